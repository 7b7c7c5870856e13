# Another llama.cpp than the pinned one: its programs, its tests, its patched programs. Sourced after lib.sh, not run.
# shellcheck shell=bash
#
# All of it is in a *home*, a folder laid out as this repository: `llama.cpp` (its sources), `build/stock`, `build/contracts`,
# `build/tests`, `build/patched`. So a compiler sees the same paths from there as from here, and its cache serves both (but for
# libllama, whose models are compiled in groups: a group's file names them by whole paths).

# build_stock HOME COMMIT NUMBER TARGET…: its programs, untouched. STOCK_EXTRA: more options for cmake.
STOCK_EXTRA=()
build_stock() {
    local home=$1 commit=$2 number=$3
    shift 3
    mkdir -p "$home/build"
    cmake -S "$home/llama.cpp" -B "$home/build/stock" "${STOCK_OPTIONS[@]}" "${STOCK_EXTRA[@]}" -DGGML_RPC=ON \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_COMMIT="$commit" -DLLAMA_BUILD_NUMBER="$number" >"$home/configure.log" 2>&1 || {
        tail -n 20 "$home/configure.log" >&2
        refuse "cmake could not configure it; the whole log is $home/configure.log"
    }
    CCACHE_BASEDIR=$home cmake --build "$home/build/stock" --target "$@" >&2
}

# build_tools HOME: the C++ programs of our tests, linked with its libraries.
build_tools() {
    local home=$1 tool
    for tool in contracts probe; do
        local folder=$home/build/$tool
        [ "$tool" != probe ] || folder=$home/build/tests
        cmake -S "$ROOT/tests/$tool" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA="$home/llama.cpp" \
            -DSTOCK_BIN="$home/build/stock/bin" >"$home/configure.log" 2>&1 || refuse "cmake failed; the whole log is $home/configure.log"
        cmake --build "$folder" >&2
    done
}

# patches_apply HOME
patches_apply() {
    local patch tree
    tree=$(cd "$1/llama.cpp" && pwd -P)
    for patch in "$ROOT"/ggml-hooks/patches/*.patch; do
        # Not a checkout, whatever is around it.
        (cd "$tree" && GIT_CEILING_DIRECTORIES=$(dirname "$tree") git apply --check --whitespace=nowarn "$patch") || return 1
    done
}

# build_patched HOME PLUGIN: its programs with our flags, which load that plugin. Cargo checks our code beside; it builds no other plugin.
build_patched() {
    local home=$1 plugin=$2
    (cd "$ROOT" && CCACHE_BASEDIR=$home MOE_HOT_LLAMA_HOME=$home cargo check --release --locked --features llama) || return 1
    ln -sfn "$plugin" "$home/build/patched/bin/$(basename "$plugin")"
}

# in_home HOME COMMAND…: runs tests with its programs instead of those in build/.
in_home() {
    local home=$1
    shift
    MOE_HOT_REQUIRE_MODEL=1 MOE_HOT_STOCK=$home/build/stock/bin MOE_HOT_CONTRACTS=$home/build/contracts/moe-contracts \
        MOE_HOT_PROBE=$home/build/tests/moe-probe MOE_HOT_PATCHED=$home/build/patched/bin "$@"
}
