"""How fast experts get to the GPU from page-locked and from pageable memory, alone and beside a CPU that reads its own experts;
and what those copies take from it. Through the CUDA driver, as the plugin's copy engine does it."""

import ctypes
import statistics
import threading
import time
from dataclasses import replace

from device.budget import Skipped
from device.folder import Failed
from device.speeds import CPU_MOE, Bench, speeds

BLOCKS = 8
ALONE_S = 2.0
N_DECODE = 128
ROUNDS = 3
MB = 1e6


class Driver:
    """The driver's functions that are used here, each answer checked."""

    def __init__(self):
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Skipped("there is no CUDA driver") from error
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
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
    return device.startswith("CUDA")


def measure(bench: Bench) -> dict:
    driver = Driver()
    block_bytes = bench.sizes.expert_bytes
    pinned, pageable = (Copies(driver, block_bytes, page_locked) for page_locked in (True, False))
    alone = {"page-locked": pinned.run(ALONE_S) / MB, "pageable": pageable.run(ALONE_S) / MB}

    # All on the CPU: nothing else is on the bus.
    command = replace(bench, n_gpu_layers=0).command(*CPU_MOE, "-p", 0, "-n", N_DECODE, "-r", 1)

    def decode() -> float:
        return speeds(bench.programs.run(command)[0])["decode"]

    quiet, beside, beside_mb = [], [], []
    for _ in range(ROUNDS):
        quiet.append(decode())
        stop, found = threading.Event(), []
        copier = threading.Thread(target=lambda stop=stop, found=found: found.append(pinned.run(bench.budget.left_s, stop)))
        copier.start()
        try:
            beside.append(decode())
        finally:
            stop.set()
            copier.join()
        beside_mb += [bytes_per_s / MB for bytes_per_s in found]
    return {
        "block_bytes": block_bytes,
        "alone_mb_per_s": alone,
        "beside_the_cpu_mb_per_s": statistics.median(beside_mb),
        "decode": {"without copies": statistics.median(quiet), "beside copies": statistics.median(beside)},
        "decode_kept": statistics.median(b / a for a, b in zip(quiet, beside, strict=True)),
    }
