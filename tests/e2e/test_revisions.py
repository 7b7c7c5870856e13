"""The same plugin in the last llama.cpp that is served, and in a foreign program with a ggml of its own.

Needs what scripts/fetch-revisions makes; `scripts/test revisions` runs it, and other tests too in that llama.cpp.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from experts_json import Profile
from fake import fake_environment
from paths import LAUNCHER, PLUGIN, REPOSITORY, REVISIONS, SHIPPED_MODEL
from processes import HANG_S, run, stock_environment
from ways import assert_same_text

PIN = dict(line.split("=", 1) for line in (REPOSITORY / "ggml-hooks/pin.env").read_text().splitlines() if line[0] != "#")
LAST = REVISIONS / f"b{PIN['LAST_BUILD']}"
LAST_BIN = LAST / "build/stock/bin"
NODE_BIN = REVISIONS / "node/package/bins/linux-x64"
GENERATE = ["-no-cnv", "--temp", 0, "-n", 60, "-t", 1, "--no-warmup", "-p", "Once upon a time"]
LEAST_TEXT = 100  # bytes


def need(*paths: Path) -> None:
    for path in paths:
        if not path.exists():
            message = f"{path} is not there: scripts/fetch-revisions makes it"
            if os.environ.get("MOE_HOT_REQUIRE_REVISIONS") == "1":
                pytest.fail(message)
            pytest.skip(message)


def own_lines(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if "moe-hot: " in line]


def complete(log: Path, environment: dict[str, str], *arguments) -> str:
    command = [LAST_BIN / "llama-completion", "-m", SHIPPED_MODEL, "--no-repack", *GENERATE, *arguments]
    return run(command, log, environment)


def test_a_program_of_the_last_revision_gives_the_same_text_while_recording(tmp_path):
    need(LAST_BIN / "llama-completion")
    stock = complete(tmp_path / "stock", stock_environment())
    out_file, log = tmp_path / "experts.json", tmp_path / "ours"
    environment = stock_environment(GGML_BACKEND_PATH=str(PLUGIN), LLAMA_ARG_MOE_LAYER_PERF_OUT=str(out_file))
    assert_same_text(stock, complete(log, environment, "--cpu-moe"), LEAST_TEXT)
    assert Profile.read(out_file).layer_calls > 0
    assert not [line for line in own_lines(log) if "not loaded" in line]


def test_a_program_of_the_last_revision_gives_the_same_text_with_a_cache(tmp_path):
    """On FakeDevice, which speaks the host's API too. The cache learns from an empty start, or from what was recorded."""
    need(LAST_BIN / "llama-completion")
    dense, recorded, out_file = ["-ngl", 99, "--cpu-moe"], tmp_path / "recorded.json", tmp_path / "experts.json"
    stock = complete(tmp_path / "stock", fake_environment(), *dense)
    recording = fake_environment(plugin=PLUGIN, LLAMA_ARG_MOE_LAYER_PERF_OUT=recorded)
    assert_same_text(stock, complete(tmp_path / "recording", recording, *dense), LEAST_TEXT)
    settings = {"LLAMA_ARG_MOE_HOT_CACHE": recorded, "LLAMA_ARG_MOE_LAYER_PERF_OUT": out_file}
    ours = complete(tmp_path / "ours", fake_environment(plugin=PLUGIN, **settings), *dense)
    assert_same_text(stock, ours, LEAST_TEXT)
    assert Profile.read(out_file, cached=True).hits > 0


def test_the_launcher_takes_its_programs(tmp_path):
    program, out_file = LAST_BIN / "llama-completion", tmp_path / "experts.json"
    need(program)
    stock = complete(tmp_path / "stock", stock_environment())
    arguments = ["-m", SHIPPED_MODEL, "--no-repack", *GENERATE, "--moe-layer-perf-out", out_file]
    ours = run([LAUNCHER, program, *arguments], tmp_path / "ours", stock_environment())
    assert_same_text(stock, ours, LEAST_TEXT)
    assert Profile.read(out_file).layer_calls > 0


# Loads the addon's backends from its own folder, and waits until its log has come.
NODE_HOST = """
const addon = { exports: {} };
process.dlopen(addon, process.argv[2] + "/llama-addon.node");
addon.exports.setLogger((level, text) => process.stdout.write(text));
addon.exports.setLoggerLogLevel(9);
addon.exports.loadBackends(process.argv[2]);
addon.exports.init().then(() => addon.exports.dispose());
"""


def test_a_foreign_program_loads_it_whatever_its_libraries_are_called(tmp_path):
    """node-llama-cpp: an addon that node opens privately, and libggml under another name."""
    need(NODE_BIN)
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not there")
    assert not (NODE_BIN / "libggml.so.0").exists(), "what this test is about"
    script = tmp_path / "host.js"
    script.write_text(NODE_HOST)
    said = run([node, script, NODE_BIN], tmp_path / "log", stock_environment(GGML_BACKEND_PATH=str(PLUGIN)))
    assert f"loaded MoEHot backend from {PLUGIN}" in said, said
    assert "moe-hot: not loaded" not in said


def test_layouts_that_differ_are_listed():
    need(LAST / "llama.cpp")
    command = [REPOSITORY / "scripts/compare-layouts", REPOSITORY / "llama.cpp", LAST / "llama.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    for line in [
        "-GGML_BACKEND_API_VERSION 2",
        "+GGML_BACKEND_API_VERSION 3",
        "-sizeof ggml_backend_buffer_type_i 48",
        "+sizeof ggml_backend_buffer_type_i 64",
        "+offsetof ggml_backend_buffer_type_i.alloc_buffer_n 16",
    ]:
        assert line in lines, done.stdout
    changed = {line[1:].split(".")[0] for line in lines if line[:1] in "+-"}
    known = {"buffer_type", "API_VERSION"}
    assert all(any(word in line for word in known) for line in changed), "nothing else that we use has moved"


def test_the_same_tree_has_the_same_layouts():
    command = [REPOSITORY / "scripts/compare-layouts", REPOSITORY / "llama.cpp", REPOSITORY / "llama.cpp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, ""), done


@pytest.mark.parametrize(
    "command",
    [
        ["compare-layouts"],
        ["compare-layouts", "."],
        ["compare-layouts", ".", "."],
        ["compare-layouts", "llama.cpp", "no-such-folder"],
        ["setup", "--llama"],
        ["setup", "llama.cpp"],
        ["setup", "--llama", "no-such-folder"],
        ["setup", "--llama", "tests"],
        ["setup", "--llama", "build/contracts"],
        ["setup", "--llama", "llama.cpp", "llama.cpp"],
        ["revisions-table", "b11434"],
        ["fetch-revisions", "b11400"],
    ],
)
def test_scripts_refuse_what_they_cannot_use(command):
    command = [REPOSITORY / "scripts" / command[0], *command[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=REPOSITORY)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "expected" in done.stderr, done
