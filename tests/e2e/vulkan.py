"""llama.cpp's Vulkan backend on a software device (scripts/fetch-vulkan): a real GPU backend, with kernels, rounding and
memory of its own."""

import os
import subprocess
from pathlib import Path

import pytest

import paths
from processes import stock_environment

FOLDER = paths.REPOSITORY / "build/vulkan"
BIN = FOLDER / "bin"
DEVICE = "Vulkan0"
# The device computes on every core, and its host spins while it waits.
N_THREADS = 1


def require() -> None:
    """Skips the test where there is no such device, unless MOE_HOT_REQUIRE_VULKAN says that there must be one."""
    if not (FOLDER / "env").exists():
        message = "no Vulkan device here: scripts/fetch-vulkan says why"
        if os.environ.get("MOE_HOT_REQUIRE_VULKAN") == "1":
            pytest.fail(message)
        pytest.skip(message)


def _variables() -> dict[str, str]:
    """What build/vulkan/env sets."""
    shown = subprocess.run(
        ["bash", "-c", f'. "{FOLDER}/env" && env -0'], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True
    )
    pairs = (line.split("=", 1) for line in shown.stdout.decode().split("\0") if "=" in line)
    return {name: value for name, value in pairs if name not in ("PATH", "PWD", "SHLVL", "_")}


def vulkan_environment(*, plugin: Path | None = None, **variables) -> dict[str, str]:
    """Programs in BIN, and moe-probe, see the device; `plugin` is loaded too."""
    load = {"GGML_BACKEND_PATH": str(plugin)} if plugin else {}
    ours = {name: str(value) for name, value in variables.items()}
    return stock_environment(MOE_PROBE_BACKENDS=str(BIN), **_variables(), **load) | ours
