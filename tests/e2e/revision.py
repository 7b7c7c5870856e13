"""Which llama.cpp the programs in STOCK_BIN are of. Its sources lie where build/stock/bin has them in this repository."""

import re
import subprocess

from paths import STOCK_BIN


def build_number() -> int:
    told = subprocess.run([STOCK_BIN / "llama-completion", "--version"], capture_output=True, text=True, timeout=60, check=True)
    return int(re.search(r"\(build (\d+)", told.stdout + told.stderr)[1])


def backend_api() -> int:
    header = STOCK_BIN.parents[2] / "llama.cpp/ggml/src/ggml-backend-impl.h"
    return int(re.search(r"GGML_BACKEND_API_VERSION (\d+)", header.read_text())[1])


def ggml_version() -> str:
    (library,) = STOCK_BIN.glob("libggml-base.so.*.*.*")
    return library.name.removeprefix("libggml-base.so.")
