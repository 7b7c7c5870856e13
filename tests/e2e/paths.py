"""Where things are: the stock programs, the plugin, the launcher, the models, all below the repository root.

MOE_HOT_PLUGIN and MOE_HOT_LAUNCHER name other builds of the plugin and the launcher (a sanitizer build, say).
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
STOCK_BIN = REPOSITORY / "build/stock/bin"
PROBE = REPOSITORY / "build/tests/moe-probe"
PLUGIN = Path(os.environ.get("MOE_HOT_PLUGIN", REPOSITORY / "target/release/libggml_moe_hot.so"))
LAUNCHER = Path(os.environ.get("MOE_HOT_LAUNCHER", REPOSITORY / "target/release/moe-hot"))
SHIPPED_MODEL = REPOSITORY / "tests/models/moe-small.gguf"

sys.path.insert(0, str(REPOSITORY / "tests/generate"))
