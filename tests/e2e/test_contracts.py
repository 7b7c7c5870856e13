"""What the plugin promises to any ggml host, checked by moe-contracts, each contract in a process of its own.

MOE_HOT_CONTRACTS names another build of it (for AddressSanitizer).
"""

import os
import subprocess
from pathlib import Path

import pytest

from paths import PLUGIN, REPOSITORY, STOCK_BIN
from processes import HANG_S, run, stock_environment

CONTRACTS = Path(os.environ.get("MOE_HOT_CONTRACTS", REPOSITORY / "build/contracts/moe-contracts"))


def names() -> list[str]:
    listed = subprocess.run([CONTRACTS, STOCK_BIN, "--list"], capture_output=True, text=True, check=True, timeout=HANG_S)
    return listed.stdout.split()


@pytest.mark.parametrize("name", names())
def test_contract(tmp_path, name):
    environment = stock_environment(
        GGML_BACKEND_PATH=str(PLUGIN), LLAMA_ARG_MOE_LAYER_PERF_OUT=str(tmp_path / "experts.json")
    )
    run([CONTRACTS, STOCK_BIN, name], tmp_path / "log", environment)
