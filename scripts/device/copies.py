"""How fast experts get to the GPU from page-locked and from pageable memory, alone and beside a CPU that reads its own experts;
and what those copies take from it. Through the CUDA driver, as the plugin's copy engine does it.

One run of llama-bench decodes several times: copies run during every second time, and during no load or start."""

import ctypes
import json
import statistics
import threading
import time
from dataclasses import replace

from device.budget import Skipped
from device.folder import Failed
from device.machine import ordinal
from device.speeds import CPU_MOE, Bench

BLOCKS = 8
ALONE_S = 2.0
N_DECODE = 128
ROUNDS = 3
MB = 1e6


class Driver:
    """The driver's functions that are used here, each answer checked."""

    def __init__(self, number: int):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Skipped("there is no CUDA driver") from error
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), number)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self.context = context

    def __call__(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise Failed(f"{name} answers {code}")


class Copies:
    """Copies blocks of one expert's size to the device, one after the other, and counts them."""

    def __init__(self, driver: Driver, block_bytes: int, page_locked: bool):
        self.driver, self.block_bytes = driver, block_bytes
        self.stream = ctypes.c_void_p()
        driver("cuStreamCreate", ctypes.byref(self.stream), 1)  # 1: waits for no other stream
        self.target = ctypes.c_uint64()
        driver("cuMemAlloc_v2", ctypes.byref(self.target), ctypes.c_size_t(BLOCKS * block_bytes))
        self.host = ctypes.c_void_p()
        if page_locked:
            driver("cuMemHostAlloc", ctypes.byref(self.host), ctypes.c_size_t(BLOCKS * block_bytes), 0)
        else:
            self.kept = ctypes.create_string_buffer(BLOCKS * block_bytes)
            self.host = ctypes.c_void_p(ctypes.addressof(self.kept))
        ctypes.memset(self.host, 1, BLOCKS * block_bytes)

    def run(self, seconds: float, stop: threading.Event | None = None) -> float:
        """Bytes per second."""
        self.driver("cuCtxSetCurrent", self.driver.context)
        begin, n = time.monotonic(), 0
        while time.monotonic() - begin < seconds and not (stop and stop.is_set()):
            for block in range(BLOCKS):
                at = block * self.block_bytes
                target, source = ctypes.c_uint64(self.target.value + at), ctypes.c_void_p(self.host.value + at)
                self.driver("cuMemcpyHtoDAsync_v2", target, source, ctypes.c_size_t(self.block_bytes), self.stream)
            self.driver("cuStreamSynchronize", self.stream)
            n += BLOCKS
        return n * self.block_bytes / (time.monotonic() - begin)


def can_be_measured(device: str) -> bool:
    return ordinal(device) is not None


class Beside:
    """Copies while something else runs, from `begin` to `end`, as often as wanted."""

    def __init__(self, copies: Copies, most_s: float):
        self.copies, self.most_s = copies, most_s
        self.bytes_per_s: list[float] = []
        self.thread: threading.Thread | None = None

    def begin(self) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=lambda: self.bytes_per_s.append(self.copies.run(self.most_s, self.stop)))
        self.thread.start()

    def end(self) -> None:
        if self.thread:
            self.stop.set()
            self.thread.join()
            self.thread = None


def measure(bench: Bench) -> dict:
    driver = Driver(ordinal(bench.device))
    block_bytes = bench.sizes.expert_bytes
    pinned, pageable = (Copies(driver, block_bytes, page_locked) for page_locked in (True, False))
    alone = {"page-locked": pinned.run(ALONE_S) / MB, "pageable": pageable.run(ALONE_S) / MB}

    # All on the CPU: nothing else is on the bus. The last time only shows the end of the one before.
    command = replace(bench, n_gpu_layers=0).command(*CPU_MOE, "-p", 0, "-n", N_DECODE, "-r", 2 * ROUNDS + 1, "--progress")
    copier = Beside(pinned, bench.budget.left_s)
    heard = {}
    for number in range(2, 2 * ROUNDS + 1, 2):
        heard |= {f"generation run {number}/": copier.begin, f"generation run {number + 1}/": copier.end}
    try:
        (row,) = json.loads(bench.programs.run(command, heard=heard)[0])
    finally:
        copier.end()
    if len(copier.bytes_per_s) != ROUNDS:
        raise Failed(f"copies beside the CPU ran {len(copier.bytes_per_s)} times; expected {ROUNDS}")
    quiet, beside = row["samples_ts"][: 2 * ROUNDS : 2], row["samples_ts"][1 : 2 * ROUNDS : 2]
    return {
        "block_bytes": block_bytes,
        "alone_mb_per_s": alone,
        "beside_the_cpu_mb_per_s": statistics.median(copier.bytes_per_s) / MB,
        "decode": {"without copies": statistics.median(quiet), "beside copies": statistics.median(beside)},
        "decode_kept": statistics.median(b / a for a, b in zip(quiet, beside, strict=True)),
    }
