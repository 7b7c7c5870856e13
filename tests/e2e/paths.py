"""Where things are: the stock programs, the plugin, the launcher, the models, all below the repository root.

MOE_HOT_PLUGIN, MOE_HOT_LAUNCHER, MOE_HOT_FAKE and MOE_HOT_PROBE name other builds of the plugin, the launcher,
FakeDevice and moe-probe (a sanitizer build, say); MOE_HOT_STOCK the programs of another llama.cpp, and MOE_HOT_REVISIONS
what scripts/fetch-revisions has made; MOE_HOT_PATCHED another folder with the patched programs.
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STOCK_BIN = Path(os.environ.get("MOE_HOT_STOCK", REPOSITORY / "build/stock/bin"))
REVISIONS = Path(os.environ.get("MOE_HOT_REVISIONS", REPOSITORY / "build/revisions"))
PATCHED_BIN = Path(os.environ.get("MOE_HOT_PATCHED", REPOSITORY / "build/patched/bin"))
PROBE = Path(os.environ.get("MOE_HOT_PROBE", REPOSITORY / "build/tests/moe-probe"))
ALLOCATIONS = PROBE.with_name("libmoe-allocations.so")
PLUGIN = Path(os.environ.get("MOE_HOT_PLUGIN", REPOSITORY / "target/release/libggml_moe_hot.so"))
LAUNCHER = Path(os.environ.get("MOE_HOT_LAUNCHER", REPOSITORY / "target/release/moe-hot"))
FAKE = Path(os.environ.get("MOE_HOT_FAKE", REPOSITORY / "target/release/libggml_fake.so"))
SHIPPED_MODEL = REPOSITORY / "tests/models/moe-small.gguf"


def to_launch(program: str) -> str | Path:
    """What the launcher is given: a program's name, which it looks up in build/stock, or the path of another llama.cpp's."""
    return STOCK_BIN / program if "MOE_HOT_STOCK" in os.environ else program


sys.path.insert(0, str(REPOSITORY / "tests/generate"))
