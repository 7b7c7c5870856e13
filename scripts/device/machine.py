"""What this machine is: processor, memory, GPU and driver; nothing that tells whose it is."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from device.folder import BIN, CUDA_BACKEND, Failed, Programs, missing_cuda_libraries

NVIDIA_FIELDS = ("name", "memory.total", "driver_version", "compute_cap", "pcie.link.gen.max", "pcie.link.width.max")
DEVICE_LINE = re.compile(r"^\s+(\w+): (.+) \((\d+) MiB, (\d+) MiB free\)$", re.MULTILINE)


@dataclass(frozen=True)
class Device:
    """As --list-devices names it; memory in MiB."""

    name: str
    description: str
    mib: int
    free_mib: int


def devices(programs: Programs, arguments: list) -> list[Device]:
    output, errors, _ = programs.run([BIN / "llama-bench", *arguments, "--list-devices"])
    found = [Device(name, words, int(mib), int(free)) for name, words, mib, free in DEVICE_LINE.findall(output + errors)]
    return list(dict.fromkeys(found))


def choose(programs: Programs, name: str | None, arguments: list) -> Device:
    """The device of that name, or the first of this machine."""
    found = devices(programs, arguments)
    for device in found:
        if name in (None, device.name):
            return device
    names = ", ".join(device.name for device in found) or "none"
    if not name and CUDA_BACKEND.exists():
        missing, _ = missing_cuda_libraries()
        if missing:
            raise Failed(
                f"{', '.join(missing)}: not found; expected CUDA 13's libraries, in LD_LIBRARY_PATH if not in a usual place"
            )
    raise Failed(
        f"{name or 'no device'}: the programs see {names}; expected a GPU, or --device RPC0 to try this script without one"
    )


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_mib() -> int:
    (kib,) = re.findall(r"^MemTotal: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(kib) // 1024


def ordinal(device: str) -> int | None:
    """Of a CUDA device, as the driver counts: CUDA1 is the second one that it shows. None for all others."""
    found = re.fullmatch(r"CUDA(\d+)", device)
    return int(found[1]) if found else None


def bus_id(number: int) -> str | None:
    """Where that one is: nvidia-smi counts otherwise, all of them in the order of the bus."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(32)
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), number),
        lambda: driver.cuDeviceGetPCIBusId(name, len(name), device),
    )
    return name.value.decode() if all(call() == 0 for call in calls) else None


def nvidia(device: str) -> dict[str, str] | None:
    """What nvidia-smi says of that device; nothing of a device that is not CUDA's."""
    number = ordinal(device)
    at = bus_id(number) if number is not None and shutil.which("nvidia-smi") else None
    if at is None:
        return None
    command = ["nvidia-smi", "-i", at, f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or not done.stdout.strip():
        return None
    return dict(zip(NVIDIA_FIELDS, (value.strip() for value in done.stdout.splitlines()[0].split(",")), strict=False))


def about(programs: Programs, device: Device) -> dict:
    version, said, _ = programs.run([BIN / "llama-bench", "--version"])
    ours, _, _ = programs.run([BIN / "moe-hot", "--version"])
    return {
        "processor": processor(),
        "processors": os.cpu_count(),
        "memory_mib": memory_mib(),
        "system": f"{platform.system()} {platform.release()}",
        "device": asdict(device),
        "nvidia": nvidia(device.name),
        "llama_cpp": next((line for line in (version + said).splitlines() if "version" in line), "unknown"),
        "moe_hot": ours.splitlines()[0],
    }
