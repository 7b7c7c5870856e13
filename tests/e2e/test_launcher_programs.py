"""Which programs the launcher takes: the unified `llama`, scripts, programs that do not answer well; wrappers are refused."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest

from conftest import shipped_model
from launcher import OUR_VERSION, SERVER_HELP, assert_refused, launch, write_fake, write_script
from paths import LAUNCHER, PROBE, STOCK_BIN
from processes import HANG_S, process, stock_environment, wait_for

RECORD = "--moe-layer-perf-out"
ADDED = ["--cpu-moe"]
# As app/llama.cpp says it.
APP_HELP = """\
Usage: llama <command> [options]

Available commands:
  serve           HTTP API server
  cli             Command-line interactive interface
  download        Download a model
  version         Show version
  licenses        Show third-party licenses
  help            Show available commands

Run 'llama help all' to show additional commands.
Run 'llama <command> --help' for command-specific usage.
"""


@pytest.fixture
def record(tmp_path) -> list:
    return [RECORD, tmp_path / "experts.json"]


@pytest.fixture
def llama(tmp_path) -> Path:
    """A stand-in for the unified program: commands first, each with its own flags. What it is asked stands in `asked`."""
    fake = write_fake(tmp_path / "command", asked=tmp_path / "asked")
    return write_script(
        tmp_path / "llama",
        f"""
case "${{1-help}}" in
    serve | server | completion) exec {fake} "$@" ;;
    version | --version) exec {fake} --version ;;
    help | --help) cat <<'END'
{APP_HELP}
END
    ;;
    update) echo updated; echo update >> {tmp_path / "asked"} ;;
    *) echo "error: unknown command '$1'" >&2; exit 1 ;;
esac
""",
    )


def test_the_unified_programs_flags_stand_behind_its_command(llama, record, tmp_path):
    assert launch(llama, "serve", "-m", "x", *record).started["args"] == ["serve", "-m", "x", *ADDED]
    assert launch(llama, *record, "server", "-m", "x").started["args"] == ["server", "-m", "x", *ADDED]
    placed = ["completion", "-ncmoe", "2"]
    assert launch(llama, *placed, *record).started["args"] == placed
    assert launch(llama, "serve", "-m", "x").started["args"] == ["serve", "-m", "x"]
    questions = {"--version", "serve|--help", "server|--help", "completion|--help"}
    assert set((tmp_path / "asked").read_text().splitlines()) == questions


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [([], 0, "Available commands"), (["--version"], 0, OUR_VERSION), (["update"], 0, "updated"), (["no"], 1, "unknown command")],
)
def test_what_the_unified_program_does_besides_is_left_to_it(llama, record, tmp_path, args, code, said):
    answer = launch(llama, *record, *args)
    assert answer.code == code and said in answer.out + answer.err
    assert (tmp_path / "asked").read_text().count("update") == (args == ["update"]), "it is not asked, it would do it"


def test_the_unified_program_computes_with_us(record, tmp_path):
    llama = write_script(
        tmp_path / "llama",
        f"""
case $1 in
    completion) shift; exec {STOCK_BIN}/llama-completion "$@" ;;
    --version) exec {STOCK_BIN}/llama-server --version ;;
    --help) printf 'Usage: llama <command> [options]\\n\\nAvailable commands:\\n  serve           HTTP API server\\n' ;;
    *) echo "error: unknown command '$1'" >&2; exit 1 ;;
esac
""",
    )
    generate = ["-m", shipped_model(), "-no-cnv", "-n", "8", "-t", "1", "--no-warmup", "-p", "Once"]
    answer = launch(llama, "completion", *generate, *record)
    assert answer.code == 0 and json.loads(record[1].read_text())["layers"], answer.err


# What stands in front: what is to be typed instead, where it can be told.
WRAPPERS = {
    "taskset -c 0 llama-server": "taskset -c 0 moe-hot llama-server …",
    "env A=1 llama-server": "env A=1 moe-hot llama-server …",
    "nice -n 5 /x/llama serve": "nice -n 5 moe-hot /x/llama …",
    "sh -c llama-server": "sh -c moe-hot llama-server …",
    "bash start.sh": "bash … moe-hot llama-server …",
    "true": "true … moe-hot llama-server …",
}


@pytest.mark.parametrize("command", WRAPPERS)
def test_a_wrapper_is_refused_with_what_to_type(record, command):
    answer = launch(*command.split(), "-m", "x", *record)
    assert_refused(answer, command.split()[0], "expected moe-hot directly in front", WRAPPERS[command])
    assert_refused(launch(*command.split(), LLAMA_ARG_MOE_LAYER_PERF_OUT=str(record[1])), WRAPPERS[command])


def test_a_wrapper_without_our_flags_is_started(tmp_path):
    fake = write_fake(tmp_path / "llama-fake")
    assert launch("env", "A=1", fake, "-m", "x").started["args"] == ["-m", "x"]


def test_a_wrapper_behind_the_launcher_or_in_front_of_it_works(tmp_path, record):
    fake = write_fake(tmp_path / "llama-fake")
    script = write_script(tmp_path / "start", f'exec env A=1 "{fake}" --mlock "$@"\n')
    started = launch(script, "-m", "x", *record).started
    assert started["args"] == ["--mlock", "-m", "x", *ADDED] and started["environment"]["A"] == "1"
    assert launch(LAUNCHER, fake, "-m", "x", *record, launcher="env").started["args"] == ["-m", "x", *ADDED]


def test_a_program_that_does_not_say_its_revision_is_let_through(record):
    """It is linked with llama.cpp's libraries, and the plugin compares when it is loaded."""
    for program in (STOCK_BIN / "llama-quantize", PROBE):
        answer = launch(program, *record)
        assert "usage" in (answer.out + answer.err).lower(), answer


def test_no_temporary_file_is_needed(tmp_path):
    assert launch("llama-server", "--version", TMPDIR="/nonexistent").code == 0
    fake = write_fake(tmp_path / "fake")
    assert launch(fake, RECORD, tmp_path / "new", TMPDIR="/nonexistent").started["args"] == ADDED


def test_nothing_can_be_written_anywhere(tmp_path):
    """As with a read-only root file system: no file can grow, only pipes."""
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash"]
    profile = tmp_path / "experts.json"
    profile.write_text('{"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 0, "experts": [[0, 1]]}]}')
    command = [*limited, LAUNCHER, "llama-completion", "--moe-hot-cache", profile, "--version"]
    done = subprocess.run(command, env=stock_environment(), capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and OUR_VERSION in done.stdout + done.stderr, done


def test_questions_are_asked_without_the_users_settings(tmp_path, record):
    """Some would make the program download a model before it answers, or truncate a log."""
    seen = tmp_path / "seen"
    program = write_script(tmp_path / "fake", f'[ "$1" != --version ] || {{ echo "{OUR_VERSION}"; env > "{seen}"; }}')
    assert launch(program, *record, LLAMA_ARG_HF_REPO="a/b", LLAMA_ARG_LOG_FILE="x", LLAMA_CACHE="kept").code == 0
    assert "LLAMA_ARG_" not in seen.read_text() and "GGML_BACKEND_PATH" not in seen.read_text()
    assert "kept" in seen.read_text()


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_a_script_that_starts_something_whatever_it_is_asked_leaves_nothing_behind(tmp_path, record):
    """What it starts keeps its outputs open. Only that of the last start, which is the user's, stays."""
    started = tmp_path / "started"
    text = f'sleep 1000 & echo $! >> "{started}"\necho "{OUR_VERSION}"\n'
    script = write_script(tmp_path / "start", text)
    log = tmp_path / "log"
    with process([LAUNCHER, script, *record, "-m", "x"], log, stock_environment()) as child:
        assert child.wait(timeout=HANG_S) == 0, log.read_text()
        *of_questions, last = map(int, started.read_text().split())
        assert len(of_questions) == 2 and is_running(last)
        wait_for("what the questions started has ended", lambda: not any(map(is_running, of_questions)))


def test_a_program_that_prints_without_end_is_stopped(tmp_path, record):
    script = write_script(tmp_path / "endless", "exec cat /dev/zero\n")
    answer = launch(script, *record)
    assert_refused(answer, "--version: no answer that ends within 20 s and 4 MiB", "expected a llama.cpp program")


