# scripts/setup --llama DIR: moe-hot for the llama.cpp in DIR. Sourced by scripts/setup, not run.
# shellcheck shell=bash
# shellcheck source=scripts/other-llama.sh
source "$(dirname "${BASH_SOURCE[0]}")/other-llama.sh"

# What has to hold in any llama.cpp: the contracts, stock's bits while recording, and with experts on FakeDevice.
CONFORMANCE=(tests/e2e/test_contracts.py tests/e2e/test_equality.py tests/e2e/test_hot_shapes.py)
# Of these the shipped model and one type; the others show the same of more types.
CONFORMANCE_CASES="not every_type and not F16 and not Q4_0 and not Q6_K and not Q8_0"

# source_of DIR: prints the folder with the sources, given that or the folder of a build.
source_of() {
    local source=$1
    if [ -f "$1/CMakeCache.txt" ]; then
        source=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$1/CMakeCache.txt")
    fi
    if [ ! -f "$source/ggml/src/ggml-impl.h" ] || [ ! -f "$source/include/llama.h" ]; then
        refuse "$1: no llama.cpp; expected its sources (a folder that holds ggml/src/ggml-impl.h) or a build of them (CMakeCache.txt)"
    fi
    (cd "$source" && pwd -P)
}

# Where all of it goes: the name is that of the folder, or of the one above where that is just `llama.cpp`.
home_of() {
    local name home
    name=$(basename "$1")
    [ "$name" != llama.cpp ] || name=$(basename "$(dirname "$1")")
    home=$ROOT/build/llama/$name
    if [ -L "$home/llama.cpp" ] && [ "$(readlink "$home/llama.cpp")" != "$1" ]; then
        refuse "build/llama/$name was made of $(readlink "$home/llama.cpp"); expected the same folder again, or another name: remove it first"
    fi
    printf '%s\n' "$home"
}

# is_taken HOME PLUGIN: whether its ggml takes this plugin; what the host says goes to HOME/taken.log.
is_taken() {
    GGML_BACKEND_PATH=$2 "$1/build/contracts/moe-contracts" "$1/build/stock/bin" loading_again_gives_the_same_registry >"$1/taken.log" 2>&1
}

# why_not_taken HOME PLUGIN: what the plugin says of a host that it does not serve.
why_not_taken() {
    GGML_BACKEND_PATH=$2 "$1/build/stock/bin/llama-completion" --list-devices 2>&1 |
        sed -n 's/.*the host goes on without it: \(.*\) (ggml .*/\1/p' | head -n 1
}

setup_llama() {
    local needed source home api number=0 commit=unknown made=$ROOT/target/release served=yes differences
    for needed in "$STOCK/llama-server" "$VENV/bin/python"; do
        [ -x "$needed" ] || refuse "$needed is missing: run scripts/setup without arguments first"
    done
    source=$(source_of "$1")
    home=$(home_of "$source")
    api=$(sed -n 's/^ *# *define GGML_BACKEND_API_VERSION *//p' "$source/ggml/src/ggml-backend-impl.h")
    case $api in
    2 | 3) ;;
    *) refuse "$source: backend API ${api:-unknown}; expected 2 or 3: src/plugin has to learn it first, see docs/revisions.md" ;;
    esac
    if [ -e "$source/.git" ] && [ "$(git -C "$source" rev-parse --is-shallow-repository)" = false ]; then
        number=$(git -C "$source" rev-list --count HEAD)
        commit=$(git -C "$source" rev-parse --short=9 HEAD)
    fi
    mkdir -p "$home"
    ln -sfn "$source" "$home/llama.cpp"

    step 1 4 "its programs, untouched (build/llama/$(basename "$home")/build/stock); about 10 minutes on 2 cores, once"
    build_stock "$home" "$commit" "$number" llama-server llama-completion ggml-rpc-server ggml-cpu
    build_tools "$home"

    step 2 4 "the plugin"
    "$ROOT/scripts/compare-layouts" "$ROOT/llama.cpp" "$source" >"$home/layouts.txt" || [ $? = 1 ]
    differences=$(wc -l <"$home/layouts.txt")
    say "backend API $api; against b$LLAMA_BUILD $differences lines differ of what moe-hot uses: $home/layouts.txt"
    cargo build --release --locked --workspace
    if is_taken "$home" "$made/libggml_moe_hot.so"; then
        say "its layouts are known: the usual plugin serves it (target/release)"
    else
        served=no
        say "the usual plugin does not serve it: $(why_not_taken "$home" "$made/libggml_moe_hot.so")"
        MOE_HOT_OTHER_TREE=$source cargo build --release --locked --package moe-hot --target-dir "$home/target"
        made=$home/target/release
        is_taken "$home" "$made/libggml_moe_hot.so" || refuse "the plugin for it is not taken either; the whole log is $home/taken.log"
        say "built for it, with its layouts: $made/libggml_moe_hot.so"
        if ! MOE_HOT_OTHER_TREE=$source cargo build --release --locked --package fake-device --target-dir "$home/target" >"$home/fake.log" 2>&1; then
            say "FakeDevice cannot be built for it ($home/fake.log): its tests, of experts on a device, are left out"
            CONFORMANCE=(tests/e2e/test_contracts.py tests/e2e/test_equality.py)
        fi
    fi

    step 3 4 "its programs with our flags (build/llama/$(basename "$home")/build/patched)"
    if ! patches_apply "$home" 2>"$home/patch.log"; then
        say "the patches do not apply to it ($home/patch.log): the launcher serves it, patched programs there are none"
    elif ! build_patched "$home" "$made/libggml_moe_hot.so" >"$home/patched.log" 2>&1; then
        say "patched programs of it cannot be built ($home/patched.log): the launcher serves it"
    fi

    step 4 4 "the tests that have to hold in any llama.cpp"
    MOE_HOT_PLUGIN=$made/libggml_moe_hot.so MOE_HOT_LAUNCHER=$made/moe-hot MOE_HOT_FAKE=$made/libggml_fake.so \
        in_home "$home" "$VENV/bin/python" -m pytest -q -ra -p no:cacheprovider "${CONFORMANCE[@]}" -k "$CONFORMANCE_CASES" >&2 ||
        refuse "some tests failed: moe-hot is not to be used with this llama.cpp as it is"
    say
    [ "$served" = yes ] || say "This plugin serves that llama.cpp and others with its layouts only; target/release is as it was."
    say "Ready after ${SECONDS} s. Try: $made/moe-hot PATH-OF-ITS/llama-server -m MODEL.gguf --moe-layer-perf-out experts.json"
    [ ! -e "$home/build/patched/bin/llama-server" ] || say "Or without the launcher: $home/build/patched/bin/llama-server"
}
