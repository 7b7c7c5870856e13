"""The plugin joins the ggml that has loaded it, whatever its name, and refuses one that it does not serve with one line.

Other revisions are played by small programs that are linked with stock's ggml and answer some questions differently: the
plugin asks the ggml of its caller, and there finds the program's own functions first.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from models import generated
from paths import PLUGIN, STOCK_BIN
from processes import HANG_S, run, stock_environment
from revision import backend_api, ggml_version
from ways import assert_same_text

PROMPT = ["-no-cnv", "--temp", "0", "-n", "60", "-t", "1", "-p", "Once upon a time there was a"]
LEAST_TEXT = 60  # bytes
WAY_OUT = "scripts/setup --llama"

# Loads ggml's backends from a folder, then the plugin as ggml does, and says whether it came.
HOST = """
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
struct registry { int api_version; void * rest[5]; };
%s
int main(int argc, char ** argv) {
    load(argv[1]);
    void * plugin = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    if (!plugin) { puts(dlerror()); return 1; }
    struct registry * (*init)(void) = (struct registry * (*)(void)) dlsym(plugin, "ggml_backend_init");
    struct registry * found = init();
    if (found != init()) { puts("two answers"); return 1; }
    if (found) { printf("taken, API %%d\\n", found->api_version); } else { puts("refused"); }
    return 0;
}
"""
# The API of STOCK_BIN's llama.cpp, and the other one that is served.
API = backend_api()
OTHER_API = {2: 3, 3: 2}[API]
LOAD = """
void ggml_backend_load_all_from_path(const char * folder);
void load(const char * folder) { ggml_backend_load_all_from_path(folder); }
"""
NO_LOAD = "void load(const char * folder) { (void) folder; }"
VERSIONS = """
size_t ggml_backend_reg_count(void) { return 2; }
struct registry first = { %d }, second = { %d };
struct registry * ggml_backend_reg_get(size_t index) { return index ? &second : &first; }
"""
# The names of the first operations, with garbage behind them.
NAMES = """
static const char * const names[] = { %s, (const char *) 1 };
const char * ggml_op_name(int op) { return names[op]; }
"""


def c_names(*words: str) -> str:
    return NAMES % ", ".join(f'"{word}"' for word in words)


FIRST_NAMES = ["NONE", "DUP", "ADD", "ADD_ID", "ADD1"]
# A revision with one more operation, before MUL_MAT_ID.
ONE_MORE = """
const char * ggml_op_name(int op) {
    const char * (*theirs)(int) = (const char * (*)(int)) dlsym((void *) -1L, "ggml_op_name");
    return op < 30 ? theirs(op) : op == 30 ? "FRESH" : theirs(op - 1);
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Builds and runs a host: what it prints, and the plugin's own lines."""
    folder = tmp_path_factory.mktemp("hosts")

    def start(code: str, *, linked: bool = True, plugin: Path = PLUGIN) -> tuple[str, list[str]]:
        source, program = folder / "host.c", folder / "host"
        source.write_text(HOST % code)
        libraries = [f"-L{STOCK_BIN}", f"-Wl,-rpath,{STOCK_BIN}", "-Wl,--no-as-needed", "-lggml", "-lggml-base"]
        command = ["gcc", "-rdynamic", "-o", program, source, *(libraries if linked else [])]
        subprocess.run([str(word) for word in command], check=True, timeout=HANG_S)
        log = folder / "log"
        said = run([program, STOCK_BIN, plugin], log, stock_environment())
        return said.strip(), [line for line in log.read_text(errors="replace").splitlines() if "moe-hot: " in line]

    return start


def test_a_host_that_is_served_is_joined_without_a_word(host):
    assert host(LOAD) == (f"taken, API {API}", [])


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (LOAD + VERSIONS % (1, 1), "backend API 1 "),
        (LOAD + VERSIONS % (4, 4), "backend API 4 "),
        (LOAD + VERSIONS % (-1, -1), "backend API -1 "),
        (LOAD + VERSIONS % (2, 3), "backends of API 2 beside others of API 3"),
        (LOAD + VERSIONS % (OTHER_API, OTHER_API), "another table of buffer types"),
        (NO_LOAD, "no backend is loaded"),
        (LOAD + "size_t ggml_tensor_overhead(void) { return 376; }", "tensors of size 376 instead of 368"),
        (LOAD + "size_t ggml_graph_overhead_custom(size_t n, _Bool g) { return n + g + 167; }", "graphs of size 168 instead"),
        (LOAD + c_names(*FIRST_NAMES, "MUL_MAT_ID"), "another operation 5 than ACC"),
        (LOAD + c_names(*FIRST_NAMES), "another operation 5 than ACC"),
        (LOAD + ONE_MORE, "another operation 30 than MUL_MAT_ID"),
        (LOAD + 'const char * ggml_unary_op_name(int op) { return op ? "NEG" : "ABS"; }', "another unary operation 1 than SGN"),
        (LOAD + "const char * ggml_glu_op_name(int op) { return NULL; }", "another GLU operation 0 than REGLU"),
        (LOAD + 'const char * ggml_type_name(int type) { return "f32"; }', "another type 1 than F16"),
        (LOAD + "void * ggml_backend_dev_backend_reg(void * dev) { return dev; }", "another layout of devices"),
        (LOAD + "void * ggml_backend_buffer_get_type(void * buffer) { return buffer; }", "another layout of buffers"),
    ],
)
def test_another_host_is_refused_with_what_was_found_and_the_way_out(host, code, found):
    said, lines = host(code)
    assert said == "refused" and len(lines) == 1, (said, lines)
    for part in [found, f"ggml {ggml_version()}, commit ", "b11312 (API 2) to b11434 (API 3)", WAY_OUT, "goes on without it"]:
        assert part in lines[0]


def test_a_function_that_is_missing_is_named(host):
    said, lines = host(NO_LOAD + VERSIONS % (API, API), linked=False)
    assert said == "refused" and len(lines) == 1
    assert "no function ggml_backend_buffer_clear" in lines[0] and WAY_OUT in lines[0]


def test_a_program_without_ggml_is_refused(host):
    said, lines = host(NO_LOAD, linked=False)
    assert said == "refused" and len(lines) == 1 and "no ggml in this process" in lines[0]


# Opens libraries as an addon does, private to itself; loads a backend with the second of them, then the plugin.
ADDON = """
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char ** argv) {
    void * own = NULL;
    for (int i = 3; i < argc; i++) {
        void * library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) { puts(dlerror()); return 1; }
        if (i == 4) { own = library; }
    }
    void * (*load)(const char *) = (void * (*)(const char *)) dlsym(own, "ggml_backend_load");
    if (!load(argv[2])) { return 1; }
    puts(load(argv[1]) ? "taken" : "refused");
    return 0;
}
"""
LIBRARIES = ["libggml-base.so.0", "libggml.so.0"]


def renamed_copy(folder: Path) -> list[Path]:
    """Stock's ggml under names of its own, as a program ships it: base, the registry, the CPU backend."""
    new = {"libggml-base.so.0": "libaddon-bas.so.0", "libggml.so.0": "libaddn.so.0", "libggml-cpu.so": "libaddn-cpu.so"}
    for old_name, name in new.items():
        content = (STOCK_BIN / old_name).read_bytes()
        for old in LIBRARIES:
            assert len(old) == len(new[old])
            content = content.replace(b"\0" + old.encode() + b"\0", b"\0" + new[old].encode() + b"\0")
        (folder / name).write_bytes(content)
    return [folder / name for name in new.values()]


def test_libraries_may_have_any_name_and_of_two_copies_the_one_that_calls_is_joined(tmp_path):
    source, program, log = tmp_path / "host.c", tmp_path / "host", tmp_path / "log"
    source.write_text(ADDON)
    subprocess.run(["gcc", "-o", program, source], check=True, timeout=HANG_S)
    copy = renamed_copy(tmp_path)
    stock = [STOCK_BIN / name for name in [*LIBRARIES, "libggml-cpu.so"]]
    for own, other in [(copy, []), (copy, stock), (stock, copy)]:
        # The other copy has loaded no backend: joined by mistake, it has none.
        said = run([program, PLUGIN, own[2], *own[:2], *other[:2]], log, stock_environment())
        assert said.split() == ["taken"], log.read_text()
        assert "moe-hot: " not in log.read_text()


def test_of_two_copies_none_is_chosen_for_a_stranger(tmp_path):
    """Python, which is of neither, calls."""
    program = """if True:
        import ctypes, sys
        libraries = [ctypes.CDLL(path) for path in sys.argv[2:]]
        init = ctypes.CDLL(sys.argv[1]).ggml_backend_init
        init.restype = ctypes.c_void_p
        print(init())
    """
    one = [STOCK_BIN / name for name in LIBRARIES]
    two = one + renamed_copy(tmp_path)[:2]
    for libraries, found in [(one, "no backend is loaded"), (two, "2 copies of ggml"), ([], "no ggml in this process")]:
        command = [sys.executable, "-c", program, PLUGIN, *libraries]
        done = subprocess.run(command, env=stock_environment(), capture_output=True, text=True, timeout=HANG_S)
        assert (done.returncode, done.stdout.strip()) == (0, "None"), done
        assert found in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_no_library_of_ggmls_is_needed():
    listed = subprocess.run(["readelf", "-d", PLUGIN], capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    needed = [line for line in listed.splitlines() if "(NEEDED)" in line]
    assert needed and not [line for line in needed if "ggml" in line], needed


def complete(folder: Path, name: str, **environment: str) -> tuple[str, list[str]]:
    """What llama-completion writes, and the plugin's own log lines."""
    log = folder / name
    command = [STOCK_BIN / "llama-completion", "-m", generated("Q4_K"), "--cpu-moe", *PROMPT]
    text = run(command, log, stock_environment(**environment))
    return text, [line for line in log.read_text(errors="replace").splitlines() if "moe-hot: " in line]


def test_a_program_goes_on_without_a_plugin_that_has_refused(tmp_path):
    """An operation has another name in this program's ggml."""
    expected, _ = complete(tmp_path, "stock")
    library, name = tmp_path / "libggml-base.so.0", b"\0MUL_MAT_ID\0"
    content = (STOCK_BIN / library.name).read_bytes()
    assert content.count(name) == 1
    library.write_bytes(content.replace(name, b"\0MUL_MAT_AD\0"))
    out_file = tmp_path / "experts.json"
    environment = {"GGML_BACKEND_PATH": str(PLUGIN), "LLAMA_ARG_MOE_LAYER_PERF_OUT": str(out_file)}
    text, lines = complete(tmp_path, "refused", LD_LIBRARY_PATH=str(tmp_path), **environment)
    assert_same_text(expected, text, LEAST_TEXT)
    assert not out_file.exists()
    assert len(lines) == 1 and "another operation 30 than MUL_MAT_ID" in lines[0], lines
