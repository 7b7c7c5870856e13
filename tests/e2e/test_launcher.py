"""The launcher: bad input ends with exit code 2 and one line; good input reaches the program unchanged."""

import os
import shutil
from pathlib import Path

import pytest

from launcher import OUR_VERSION, SERVER_HELP, Answer, assert_refused, launch, write_fake
from paths import LAUNCHER, PLUGIN, STOCK_BIN

PERF_OUT = "LLAMA_ARG_MOE_LAYER_PERF_OUT"


@pytest.fixture
def fake(tmp_path) -> Path:
    return write_fake(tmp_path / "llama-fake")


@pytest.fixture
def out_file(tmp_path) -> Path:
    return tmp_path / "experts.json"


FLAG = "--moe-layer-perf-out"
SIZE = "--moe-hot-cache-max-mib"
RESERVE = "--moe-hot-cache-auto-reserve-mib"
DEVICE = "--moe-hot-cache-device"
# name: the arguments, and what the one line must say: what was given and what was expected.
# {} is the test's folder, which holds the programs `good` and `old` and the files `plain` and `wrong.json`.
BAD_INPUTS = {
    "no such program by name": (["llama-nonsense"], ["llama-nonsense", "expected a llama.cpp program"]),
    "no such program by path": (["{}/none"], ["{}/none", "expected the path of an executable"]),
    "a file that is no program": (["{}/plain"], ["{}/plain", "expected the path of an executable"]),
    "a folder as program": (["{}"], ["{}", "expected the path of an executable"]),
    "another revision": (["{}/old", "-m", "x", FLAG, "{}/new"], ["{}/old", "79c1160b0", "backend API 1; served are"]),
    "unknown flag": (["{}/good", "--moe-nonsense"], ["--moe-nonsense", f"our flags are {FLAG} FILE"]),
    "flag without value": (["{}/good", FLAG], ["a value is required", FLAG]),
    "flag before another flag": (["{}/good", FLAG, "-m", "x"], ["a value is required", FLAG]),
    "empty value": (["{}/good", f"{FLAG}="], ["a value is required", FLAG]),
    "no such folder": (["{}/good", FLAG, "{}/no/e.json"], ["{}/no/e.json", "expected an existing folder"]),
    "not writable": (["{}/good", FLAG, "/proc/e.json"], ["/proc/e.json", "expected an existing folder"]),
    "a folder": (["{}/good", FLAG, "{}"], ["{}", "it is a folder", "expected a new file"]),
    "a device": (["{}/good", FLAG, "/dev/null"], ["/dev/null", "not a regular file", "expected a new file"]),
    "no profile": (["{}/good", FLAG, "{}/plain"], ["{}/plain", "not a routing profile", "expected a new file"]),
    "another schema": (["{}/good", FLAG, "{}/wrong.json"], ["other.v9", "llama.cpp.moe_layer_perf.v1"]),
    "a size below -1": (["{}/good", SIZE, "-2"], [SIZE, "'-2'", "expected a whole number of MiB"]),
    "a size that is no number": (["{}/good", f"{SIZE}=8G"], [SIZE, "'8G'", "0 for off or -1 for automatic"]),
    "a size without end": (["{}/good", SIZE, "9" * 30], [SIZE, "9" * 30, "up to 17592186044415"]),
    "a negative reserve": (["{}/good", RESERVE, "-1"], [RESERVE, "'-1'", "from 0 to"]),
    "a size without a cache": (["{}/good", SIZE, "-1"], [SIZE, "expected --moe-hot-cache FILE"]),
    "a reserve without a cache": (["{}/good", RESERVE, "1"], [RESERVE, "expected --moe-hot-cache FILE"]),
    "a device without a cache": (["{}/good", DEVICE, "CUDA0"], [DEVICE, "expected --moe-hot-cache FILE"]),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_refused_with_one_line(tmp_path, name):
    write_fake(tmp_path / "good")
    # What the plugin says in such a program.
    refusal = "0.00 W moe-hot: not loaded, the host goes on without it: backend API 1; served are some"
    write_fake(tmp_path / "old", "version: 6123 (79c1160b0)", f"{SERVER_HELP}\n--list-devices", refusal)
    (tmp_path / "plain").write_text("neither a program nor a profile")
    (tmp_path / "wrong.json").write_text('{"schema": "other.v9", "layers": []}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    args, said = ([text.format(tmp_path) for text in texts] for texts in BAD_INPUTS[name])
    assert_refused(launch(*args), *said)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before, "nothing is lost or left behind"


def test_an_executable_file_that_is_no_program_is_bad_input(tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(bytes(64))
    broken.chmod(0o755)
    assert_refused(launch(broken, FLAG, tmp_path / "new"), str(broken), "cannot be started")


def assert_failed(answer: Answer, *said: str) -> None:
    """Exit code 1: nothing that the user has typed was wrong."""
    assert (answer.code, answer.out) == (1, ""), answer
    (line,) = answer.err.splitlines()
    assert line.startswith("moe-hot: ") and all(part in line for part in said), line


def test_what_is_not_the_users_fault_ends_with_1(fake, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("# n_expert=4\nstep,phase,layer,expert\n0,1,0,1\n")
    assert_failed(launch("replay", trace, "--slots", "1", "--json", "/dev/full"), "/dev/full")
    alone = shutil.copy(LAUNCHER, tmp_path / "moe-hot")
    assert_failed(launch(fake, FLAG, tmp_path / "new", launcher=alone), "the plugin is missing")
    assert launch(fake, "-m", "x", launcher=alone).started["args"] == ["-m", "x"]


def test_a_bad_path_in_the_environment_is_refused_too(fake, tmp_path):
    answer = launch(fake, **{PERF_OUT: str(tmp_path)})
    assert answer.code == 2 and "it is a folder" in answer.err


def test_an_empty_path_in_the_environment_is_none(fake):
    assert launch(fake, "-m", "x", **{PERF_OUT: ""}).started["args"] == ["-m", "x"]


def test_no_program_is_refused_with_usage():
    answer = launch()
    assert answer.code == 2 and "Usage: moe-hot PROGRAM" in answer.err


# what GGML_BACKEND_PATH names, below the test's folder: what the line must say
OTHER_BACKENDS = {"other.so": "loads only one", "none.so": "where nothing is", ".": "a folder"}


@pytest.mark.parametrize("name", OTHER_BACKENDS)
def test_another_backend_in_the_environment_is_not_replaced(fake, out_file, name):
    other = out_file.parent / name
    if name == "other.so":
        other.touch()
    answer = launch(fake, FLAG, out_file, GGML_BACKEND_PATH=str(other))
    assert_refused(answer, "GGML_BACKEND_PATH", str(other), OTHER_BACKENDS[name], "expected it unset")
    started = launch(fake, "-m", "x", GGML_BACKEND_PATH=str(other)).started
    assert started["environment"]["GGML_BACKEND_PATH"] == str(other), "nothing of ours was asked for"


def test_our_own_plugin_may_be_there(fake, out_file):
    assert launch(fake, FLAG, out_file, GGML_BACKEND_PATH=str(PLUGIN)).code == 0


def test_our_flag_becomes_environment_and_the_rest_stays(fake, out_file):
    started = launch(fake, "-m", "a b.gguf", FLAG, out_file, "--temp", "0", "-p", "--moe", b"\xff").started
    assert started["args"] == ["-m", "a b.gguf", "--temp", "0", "-p", "--moe", "\udcff", "--cpu-moe"]
    assert started["environment"][PERF_OUT] == str(out_file)
    assert Path(started["environment"]["GGML_BACKEND_PATH"]).samefile(PLUGIN)
    assert not out_file.exists(), "the launcher only looks"


@pytest.mark.parametrize("given", [["--moe_layer_perf_out", "{}"], ["--moe_layer-perf_out={}"]])
def test_our_flags_may_be_written_with_underscores(fake, out_file, given):
    started = launch(fake, *(word.format(out_file) for word in given)).started
    assert (started["args"], started["environment"][PERF_OUT]) == (["--cpu-moe"], str(out_file))


def test_a_prompt_that_looks_like_our_flag_stays_a_prompt(fake, out_file):
    prompt = ["-p", FLAG, "--control-vector-layer-range", "--cpu-moe", SIZE]
    started = launch(fake, *prompt, FLAG, out_file).started
    assert started["args"] == [*prompt, "--cpu-moe"]
    alone = launch(fake, *prompt).started
    assert alone["args"] == prompt and "GGML_BACKEND_PATH" not in alone["environment"]


def test_a_relative_profile_path_is_made_absolute(fake, tmp_path):
    started = launch(fake, f"{FLAG}=experts.json", cwd=tmp_path).started
    assert started["environment"][PERF_OUT] == str(tmp_path / "experts.json")


def test_an_earlier_profile_may_be_replaced(fake, out_file):
    out_file.write_text('{"schema": "llama.cpp.moe_layer_perf.v1", "layers": []}')
    assert launch(fake, FLAG, out_file).code == 0


def test_without_our_flags_nothing_is_asked_or_added(tmp_path):
    fake = write_fake(tmp_path / "fake", asked=tmp_path / "asked")
    started = launch(fake, "-m", "x", "--moe-cache-mib", "1", b"\xff").started
    assert started["args"] == ["-m", "x", "--moe-cache-mib", "1", "\udcff"]
    assert not {PERF_OUT, "GGML_BACKEND_PATH"} & started["environment"].keys()
    assert not (tmp_path / "asked").exists()


def test_a_bare_name_is_found_in_our_own_build_of_stock():
    answer = launch("llama-server", "--version")
    assert answer.code == 0 and OUR_VERSION in answer.out + answer.err


def test_a_bare_name_is_found_in_path(tmp_path):
    write_fake(tmp_path / "llama-mine")
    started = launch("llama-mine", "x", PATH=f"{tmp_path}:{os.environ['PATH']}").started
    assert started["args"] == ["x"]


def test_a_program_that_does_not_say_its_revision_is_let_through():
    answer = launch(STOCK_BIN / "llama-quantize", "--help")
    assert "usage" in (answer.out + answer.err).lower()
