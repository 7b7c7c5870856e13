# scripts/setup --cuda: llama.cpp's CUDA backend, which needs no GPU to be built. Sourced by scripts/setup, not run.
#
# Only libggml-cuda.so is built: a backend is a library of its own that the programs load. So the stock programs that are there
# already serve, and the patched ones too, whose ggml is the same. Everything is below build/cuda; nothing of the system is changed.
# shellcheck shell=bash

CUDA=$ROOT/build/cuda
CUDA_PACKAGES=$ROOT/ggml-hooks/cuda.txt
# Where NVIDIA's packages unpack to.
CUDA_UNPACKED=$CUDA/toolkit/nvidia/cu13
CUDA_STEPS=4

# The architecture of the GPU of this machine, as cmake wants it, or 90 where there is none.
default_arch() {
    local found
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '.') || found=
    [[ $found =~ ^[0-9]+$ ]] || found=90
    echo "$found"
}

# Prints the compiler of the system's toolkit, if there is one.
system_nvcc() {
    local nvcc
    for nvcc in "$(command -v nvcc || true)" "${CUDA_PATH:-}/bin/nvcc" "${CUDA_HOME:-}/bin/nvcc" /usr/local/cuda/bin/nvcc; do
        if [ -x "$nvcc" ]; then
            echo "$nvcc"
            return
        fi
    done
    return 1
}

# Unpacks NVIDIA's packages, unless just these are there, and adds the names that a linker looks for.
fetch_toolkit() {
    local stamp=$CUDA/toolkit.origin wanted library
    wanted=$(sha256sum "$CUDA_PACKAGES" | cut -d' ' -f1)
    if [ -x "$CUDA_UNPACKED/bin/nvcc" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then return; fi
    [ "$(uname -sm)" = "Linux x86_64" ] || refuse "no CUDA toolkit here, and its packages are for Linux on x86-64: install a toolkit"
    rm -rf "$CUDA/toolkit"
    "$VENV/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-compile --require-hashes --only-binary=:all: \
        --target "$CUDA/toolkit" -r "$CUDA_PACKAGES" >&2 ||
        refuse "pip cannot fetch the packages in ggml-hooks/cuda.txt; expected them, or a CUDA toolkit of the system (nvcc in PATH)"
    ln -sfn lib "$CUDA_UNPACKED/lib64"
    for library in cublas cublasLt cudart; do
        ln -sfn "lib$library.so.13" "$CUDA_UNPACKED/lib/lib$library.so"
    done
    echo "$wanted" >"$stamp"
}

# build_backend ARCH NVCC OPTION…
build_backend() {
    local arch=$1 nvcc=$2
    shift 2
    cmake -S "$ROOT/llama.cpp" -B "$CUDA/build" "${STOCK_OPTIONS[@]}" -DGGML_CUDA=ON -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_COMMIT="${LLAMA_COMMIT:0:9}" -DLLAMA_BUILD_NUMBER="$LLAMA_BUILD" \
        -DCMAKE_CUDA_COMPILER="$nvcc" -DCMAKE_CUDA_ARCHITECTURES="$arch" "$@" >"$CUDA/configure.log" 2>&1 || {
        tail -n 20 "$CUDA/configure.log" >&2
        refuse "cmake could not configure llama.cpp with CUDA; the whole log is build/cuda/configure.log"
    }
    cmake --build "$CUDA/build" --target ggml-cuda >&2
}

# place FOLDER NAME: the programs of a folder, and the backend beside them: they look for backends in their own folder.
place() {
    local made=$CUDA/$2
    rm -rf "${made:?}"
    mkdir "$made"
    cp -a "$1/." "$made"
    cp -l "$CUDA/build/bin/libggml-cuda.so" "$made/"
}

# Whether programs load the backend. That needs no GPU.
loads_cuda() {
    "$1/llama-bench" --list-devices >"$CUDA/devices.log" 2>&1 && grep -q 'loaded CUDA backend' "$CUDA/devices.log"
}

setup_cuda() {
    local arch=${1:-$(default_arch)} nvcc options=() folder
    [[ $arch =~ ^[0-9]+[a-z]?(;[0-9]+[a-z]?)*$ ]] || refuse "--arch $arch: expected a compute capability without its point, such as 90 or 86"
    for folder in "$STOCK/llama-bench" "$VENV/bin/python"; do
        [ -x "$folder" ] || refuse "$folder is missing: run scripts/setup without arguments first"
    done
    mkdir -p "$CUDA"

    step 1 $CUDA_STEPS "a CUDA toolkit"
    if nvcc=$(system_nvcc); then
        say "the system's: $nvcc"
    else
        fetch_toolkit
        nvcc=$CUDA_UNPACKED/bin/nvcc
        # These packages have no stub of the driver to link with, which only the pool of virtual memory wants.
        # The loader does not know this toolkit: the backend names its folder as seen from where place puts it.
        options=(-DCUDAToolkit_ROOT="$CUDA_UNPACKED" -DGGML_CUDA_NO_VMM=ON "-DCMAKE_BUILD_RPATH=\$ORIGIN/../${CUDA_UNPACKED#"$CUDA/"}/lib")
        say "that of ggml-hooks/cuda.txt (build/cuda/toolkit): the system has none"
    fi

    step 2 $CUDA_STEPS "llama.cpp's CUDA backend for compute capability $arch; about 35 minutes on 2 cores, once"
    build_backend "$arch" "$nvcc" "${options[@]}"

    step 3 $CUDA_STEPS "the programs with it (build/cuda/bin, build/cuda/patched)"
    place "$STOCK" bin
    if [ -x "$ROOT/build/patched/bin/llama-server" ]; then
        place "$ROOT/build/patched/bin" patched
    else
        say "no patched programs here, so none with CUDA: scripts/setup without arguments makes them"
    fi

    step 4 $CUDA_STEPS "whether the programs load it"
    loads_cuda "$CUDA/bin" || refuse "build/cuda/bin/llama-bench does not load the CUDA backend; what it says is in build/cuda/devices.log"
    sed -n '/^Available devices/,$p' "$CUDA/devices.log" >&2
    say
    say "Ready after ${SECONDS} s. On a machine with a GPU: scripts/device-check"
}
