# Shared by the scripts beside it: where things are, and how steps are announced. Sourced, not run.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
STOCK=$ROOT/build/stock/bin
VENV=$ROOT/build/venv
# shellcheck source=ggml-hooks/pin.env
source "$ROOT/ggml-hooks/pin.env"
export STOCK VENV LLAMA_COMMIT LLAMA_BUILD SDIST SDIST_SHA256

# How stock llama.cpp is built, of whatever revision.
STOCK_OPTIONS=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF
    -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
    -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DGIT_EXE=0)
export STOCK_OPTIONS

say() { printf '%s\n' "$*" >&2; }

# The script cannot go on and the reader can mend it.
refuse() {
    say "$(basename "$0"): $*"
    exit 2
}

# step N OF TEXT: what is being done, how far it is, and the time since the start.
step() { printf '\n[%s/%s, %dm%02ds] %s\n' "$1" "$2" $((SECONDS / 60)) $((SECONDS % 60)) "$3" >&2; }
