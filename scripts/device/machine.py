"""What this machine is: processor, memory, GPU and driver; nothing that tells whose it is."""

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


def nvidia() -> dict[str, str] | None:
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader"]
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
        "nvidia": nvidia(),
        "llama_cpp": next((line for line in (version + said).splitlines() if "version" in line), "unknown"),
        "moe_hot": ours.splitlines()[0],
    }
