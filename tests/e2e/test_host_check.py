"""The plugin refuses a host that it does not fit, with one line, and the host goes on without it.

Another revision is played by a preloaded library that answers in place of ggml's own functions.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from models import generated
from paths import PLUGIN, STOCK_BIN
from processes import HANG_S, run, stock_environment

PROMPT = ["-no-cnv", "--temp", "0", "-n", "8", "-t", "1", "-p", "Once upon a time there was a"]


@pytest.fixture
def pretend(tmp_path):
    """Builds a library that pretends to be another ggml, for LD_PRELOAD."""

    def build(commit: str, version: str) -> Path:
        source, library = tmp_path / "pretend.c", tmp_path / "pretend.so"
        source.write_text(
            f'const char * ggml_commit(void) {{ return "{commit}"; }}\n'
            f'const char * ggml_version(void) {{ return "{version}"; }}\n'
        )
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=HANG_S)
        return library

    return build


def complete(folder: Path, name: str, **environment: str) -> tuple[str, list[str]]:
    """What llama-completion writes, and the plugin's own log lines."""
    log = folder / name
    command = [STOCK_BIN / "llama-completion", "-m", generated("Q4_K"), "--cpu-moe", *PROMPT]
    text = run(command, log, stock_environment(**environment))
    return text, [line for line in log.read_text(errors="replace").splitlines() if "moe-hot: " in line]


def test_another_revision_is_refused_and_both_are_named(tmp_path, pretend):
    library = pretend("deadbeef0", "0.24.9")
    expected, _ = complete(tmp_path, "stock")
    out_file = tmp_path / "experts.json"
    text, lines = complete(
        tmp_path,
        "refused",
        GGML_BACKEND_PATH=str(PLUGIN),
        LD_PRELOAD=str(library),
        LLAMA_ARG_MOE_LAYER_PERF_OUT=str(out_file),
    )
    assert text == expected
    assert len(lines) == 1, lines
    for part in ["ggml 0.24.9 (deadbeef0)", "ggml 0.25.3 (0c1e57098)", "the host goes on without it", "build both"]:
        assert part in lines[0]
    assert not out_file.exists()


def test_an_unnamed_revision_is_taken_with_a_warning_if_versions_and_layouts_fit(tmp_path, pretend):
    library = pretend("unknown", "0.25.3")
    out_file = tmp_path / "experts.json"
    _, lines = complete(
        tmp_path,
        "weak",
        GGML_BACKEND_PATH=str(PLUGIN),
        LD_PRELOAD=str(library),
        LLAMA_ARG_MOE_LAYER_PERF_OUT=str(out_file),
    )
    assert any("does not name its llama.cpp revision" in line for line in lines)
    assert out_file.exists()


def test_an_unnamed_revision_of_another_version_is_refused(tmp_path, pretend):
    library = pretend("unknown", "0.24.9")
    _, lines = complete(tmp_path, "refused", GGML_BACKEND_PATH=str(PLUGIN), LD_PRELOAD=str(library))
    assert len(lines) == 1 and "ggml 0.24.9 (unknown)" in lines[0]


def test_a_second_copy_of_ggml_is_refused():
    """A host that is linked statically brings no CPU device into the copy that we find."""
    program = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ggml_backend_init; f.restype = ctypes.c_void_p; print(f())"
    done = subprocess.run(
        [sys.executable, "-c", program, str(PLUGIN)],
        env=stock_environment(LD_LIBRARY_PATH=str(STOCK_BIN)),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0 and done.stdout.strip() == "None", done
    assert "no CPU device" in done.stderr and "statically" in done.stderr
