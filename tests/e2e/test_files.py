"""Profiles and traces on file systems as they are: written all the same, or refused with one line; never lost silently, and
never at the price of the answer. What single calls may do is in src/files/tests.rs."""

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from experts_json import Profile
from fake import fake_environment
from hot import ends
from launcher import assert_refused, launch, write_fake
from learning import MISS, UPDATE_RATE
from models import generated
from paths import LAUNCHER, PLUGIN, PROBE, STOCK_BIN
from probe import decode, greedy
from processes import HANG_S, process, stock_environment, wait_for
from server import COMMON_ARGUMENTS, start
from traces import MAGIC, Trace
from unkind_files import (
    FORBIDDING_LINKS,
    WITHOUT_PRIVILEGES,
    faults_library,
    needs_root,
    with_file_mounted,
    with_shell,
)

OUT, TRACE, CACHE = "--moe-layer-perf-out", "--moe-trace-out", "--moe-hot-cache"
GENERATE = ["-no-cnv", "--temp", 0, "--ignore-eos", "-n", 30, "-t", 1, "--no-warmup", "-p", "Once upon a time"]
# Its log is silent, so that the plugin writes its lines itself: at its exit no other program's log thread loses them.
BENCH, MEASURE = "llama-bench", ["-p", 0, "-n", 30, "-r", 1, "-t", 1]


def program_run(*wrapper, plugin_only: bool = False, name: str = BENCH, arguments: list = MEASURE, **environment: str):
    """Runs a program with these words before it: through the launcher, or with nothing but variables."""

    def run(*flags) -> subprocess.CompletedProcess:
        everything_on_cpu = ["-ncmoe", 999] if plugin_only else []
        program = [STOCK_BIN / name] if plugin_only else [LAUNCHER, name]
        plugin = {"GGML_BACKEND_PATH": str(PLUGIN)} if plugin_only else {}
        command = [*wrapper, *program, "-m", generated("Q4_K"), *arguments, *everything_on_cpu, *flags]
        done = subprocess.run(
            [str(word) for word in command],
            env=stock_environment(**plugin, **environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done

    return run


def ours(log: str) -> list[str]:
    return [line.partition("moe-hot: ")[2] for line in log.splitlines() if "moe-hot: " in line]


def complaints(log: str) -> list[str]:
    return [line for line in ours(log) if not line.startswith(("recording expert usage", "recorded "))]


def assert_replays(trace: Path) -> None:
    done = launch("replay", "--slots", "8", "--policy", "lru", trace)
    assert done.code == 0, done.err
    assert Trace.read(trace).batches


def assert_saved(profile: Path, log: str) -> None:
    assert Profile.read(profile).layer_calls > 0
    assert sum(line.startswith("recorded ") for line in ours(log)) == 1


@pytest.fixture
def program(tmp_path) -> Path:
    return write_fake(tmp_path / "llama-fake")


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "files"
    made.mkdir()
    return made


FAULTS = {
    "a folder that cannot be synced (SMB, WSL)": ({"FAIL_FSYNC_FOLDER": errno.EINVAL}, [], []),
    "no sync": ({"FAIL_FSYNC_FOLDER": errno.ENOSYS, "FAIL_FSYNC": errno.EINVAL}, [], []),
    "no locks (NFS)": ({"FAIL_FLOCK": errno.ENOLCK}, ["cannot be locked"], ["cannot be locked"]),
    "rename cannot replace": ({"FAIL_RENAME": errno.EXDEV}, ["overwritten where it is"], []),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_the_file_system_cannot_do_costs_nothing(tmp_path, folder, name):
    faults, of_profile, of_trace = FAULTS[name]
    profile, trace = folder / "experts.json", folder / "trace"
    profile.touch()
    variables = {name: str(error) for name, error in faults.items()}
    run = program_run(LD_PRELOAD=str(faults_library(tmp_path)), **variables)
    log = run(OUT, profile, TRACE, trace).stderr
    assert_saved(profile, log)
    assert_replays(trace)
    said = complaints(log)
    assert sorted(line.partition(":")[0] for line in said) == sorted([str(profile)] * len(of_profile) + [str(trace)] * len(of_trace))
    assert all(part in line for part, line in zip(of_profile + of_trace, said, strict=True))
    assert {path.name for path in folder.iterdir()} == {"experts.json", "trace"}


@pytest.mark.parametrize("plugin_only", [False, True], ids=["launcher", "plugin"])
def test_a_mount_without_hard_links(folder, plugin_only):
    profile, trace = folder / "experts.json", folder / "trace"
    variables = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": str(profile), "LLAMA_ARG_MOE_TRACE_OUT": str(trace)}
    done = program_run(*FORBIDDING_LINKS, plugin_only=plugin_only, **variables)()
    assert_saved(profile, done.stderr)
    assert_replays(trace)
    assert complaints(done.stderr) == []


@needs_root
def test_a_file_mounted_into_a_container(tmp_path, folder):
    for name, flag, content in (("profile", OUT, b""), ("trace", TRACE, MAGIC)):
        host, inside = tmp_path / name, folder / name
        host.write_bytes(content)
        inside.touch()
        log = program_run(*with_file_mounted(host, inside))(flag, inside).stderr
        assert inside.stat().st_size == 0, "outside of the mount nothing is there"
        if name == "trace":
            assert complaints(log) == []
            assert_replays(host)
        else:
            (line,) = complaints(log)
            assert line.startswith(f"{inside}: ") and "overwritten where it is" in line and "busy" in line
            assert_saved(host, log)
    assert {path.name for path in folder.iterdir()} == {"profile", "trace"}


@needs_root
def test_what_is_learnt_is_kept_in_a_mounted_file(hot, tmp_path, folder):
    host = Path(shutil.copy(hot.profile(generated("Q4_K"), [decode(1), greedy(100)]), tmp_path / "host.json"))
    inside, before = folder / "experts.json", host.read_bytes()
    inside.touch()
    (tmp_path / "run.json").write_text(json.dumps({"model": str(generated("Q4_K")), "steps": [decode(1), greedy(60)]}))
    learns = {UPDATE_RATE: 1, MISS: "copy", "MOE_HOT_TEST_SLOTS": 8}
    environment = fake_environment(plugin=PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=inside, **learns)
    command = [*with_file_mounted(host, inside), PROBE, tmp_path / "run.json", tmp_path]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and ends(done.stderr)[0].hits > 0, done.stderr[-2000:]
    assert host.read_bytes() != before
    assert all(layer["ranks"] for layer in json.loads(host.read_text())["moe_hot"]["layers"])
    assert sum("overwritten where it is" in line for line in ours(done.stderr)) == 1


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_a_folder_that_may_not_be_written_to_with_files_that_may(folder):
    profile, trace = folder / "experts.json", folder / "trace"
    profile.touch()
    trace.touch()
    folder.chmod(0o555)
    try:
        log = program_run(*WITHOUT_PRIVILEGES)(OUT, profile, TRACE, trace).stderr
    finally:
        folder.chmod(0o755)
    (line,) = complaints(log)
    assert "overwritten where it is" in line and "Permission denied" in line
    assert_saved(profile, log)
    assert_replays(trace)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_what_can_be_known_not_to_be_writable_is_refused_before_the_start(program, folder):
    def refused(*arguments) -> None:
        command = [*WITHOUT_PRIVILEGES, LAUNCHER, program, *arguments]
        done = subprocess.run(
            list(map(str, command)), env=stock_environment(), capture_output=True, text=True, timeout=HANG_S
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert str(arguments[-1]) in done.stderr and "Permission denied" in done.stderr

    profile, trace = folder / "experts.json", folder / "trace"
    for path, flag, content in ((profile, OUT, b""), (trace, TRACE, MAGIC)):
        path.write_bytes(content)
        path.chmod(0o444)
        refused(flag, path)
    folder.chmod(0o555)
    try:
        refused(OUT, folder / "new.json")
        refused(TRACE, folder / "new")
    finally:
        folder.chmod(0o755)


@needs_root
def test_a_read_only_file_system_is_refused(program, folder):
    (folder / "experts.json").touch()
    read_only = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o ro none "$0" && exec "$@"', folder]
    for flag in (OUT, TRACE):
        command = [*read_only, LAUNCHER, program, flag, folder / "new"]
        done = subprocess.run(
            list(map(str, command)), env=stock_environment(), capture_output=True, text=True, timeout=HANG_S
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        assert "Read-only file system" in done.stderr


@pytest.mark.parametrize("flag", [OUT, TRACE])
def test_what_is_no_file_is_refused(program, folder, flag):
    fifo, loop, listening = folder / "fifo", folder / "loop", folder / "socket"
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(listening))
        for path, said in (
            (folder, "it is a folder"),
            (fifo, "it is a pipe, socket or device"),
            (listening, "it is a pipe, socket or device"),
            ("/dev/null", "it is a pipe, socket or device"),
            ("/dev/stdout", "it is a pipe, socket or device"),
            (loop, "symbolic links"),
            (folder / "nowhere/file", "existing folder"),
        ):
            assert_refused(launch(program, flag, path), str(path), said)


def test_a_programs_own_output_is_no_file_of_ours(program, folder):
    log = folder / "log"
    with log.open("w") as output:
        command = [str(word) for word in (LAUNCHER, program, OUT, log)]
        done = subprocess.run(command, env=stock_environment(), stdout=output, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "own input or output" in done.stderr
    assert log.read_text() == ""


@pytest.mark.parametrize("plugin_only", [False, True], ids=["launcher", "plugin"])
def test_one_file_for_profile_and_trace_is_refused(program, folder, plugin_only):
    file, link = folder / "file", folder / "link"
    link.symlink_to(file)
    for one, other in ((file, file), (file, link)):
        if plugin_only:
            variables = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": str(one), "LLAMA_ARG_MOE_TRACE_OUT": str(other)}
            log = program_run(plugin_only=True, **variables)().stderr
            assert any("no trace is written" in line and "profile's file" in line for line in ours(log))
            assert_saved(file, log)
        else:
            assert_refused(launch(program, OUT, one, TRACE, other), "name one file", str(file))


def test_links_are_followed_to_files_that_are_there_and_to_new_ones(folder):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for is_there in (False, True):
        for name, flag in (("profile", OUT), ("trace", TRACE)):
            link = folder / f"{name}-link"
            if not is_there:
                link.symlink_to(Path("elsewhere") / name)
            program_run()(flag, link)
            assert link.is_symlink()
    assert Profile.read(elsewhere / "profile").layer_calls > 0
    assert_replays(elsewhere / "trace")
    assert {path.name for path in elsewhere.iterdir()} == {"profile", "trace"}


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_do_not_become_our_files(folder, closed):
    profile, trace = folder / "experts.json", folder / "trace"
    profile.write_text("")
    variables = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": str(profile), "LLAMA_ARG_MOE_TRACE_OUT": str(trace)}
    shell = with_shell(f"exec {closed}")
    program_run(*shell, plugin_only=True, name="llama-completion", arguments=GENERATE, **variables)()
    assert Profile.read(profile).layer_calls > 0
    assert_replays(trace)


def test_a_file_size_limit_ends_our_files_and_not_the_program(folder):
    profile, trace = folder / "experts.json", folder / "trace"
    done = program_run(*with_shell("ulimit -f 1"))(OUT, profile, TRACE, trace, "-n", 200)
    assert "t/s" in done.stdout
    told = complaints(done.stderr)
    (of_profile,) = [line for line in told if "profile not saved" in line]
    (of_trace,) = [line for line in told if "trace ended" in line]
    assert all("file-size limit" in line and "ulimit -f" in line for line in (of_profile, of_trace))
    assert not profile.exists()
    assert trace.stat().st_size == 1024
    assert launch("replay", "--slots", "8", "--policy", "lru", trace).code == 0


def serve(folder: Path, *arguments, **environment: str):
    command = [LAUNCHER, "llama-server", "-m", generated("Q4_K"), *COMMON_ARGUMENTS, *arguments]
    return start(command, folder, "server", stock_environment(**environment))


def test_a_full_disk_costs_nothing_once_there_is_room_again(tmp_path, folder):
    profile, trace, full = folder / "experts.json", folder / "trace", folder / "full"
    profile.touch()
    full.touch()
    faults = {"FAIL_WRITE": str(errno.ENOSPC), "FAIL_WHILE": str(full)}
    library = str(faults_library(tmp_path))
    with serve(tmp_path, OUT, profile, TRACE, trace, LD_PRELOAD=library, **faults) as server:
        server.complete([1, 2, 3], 20)

        def told() -> list[str]:
            return [line for line in ours(server.log.read_text(errors="replace")) if "No space left" in line]

        wait_for("both are told", lambda: len(told()) == 2)
        assert (profile.read_bytes(), trace.read_bytes()) == (b"", b"")
        full.unlink()
        server.complete([1, 2, 3], 20)
        wait_for("both are written", lambda: profile.stat().st_size and trace.stat().st_size)
        assert len(told()) == 2
        server.stop()
    assert Trace.read(trace).counts() == Profile.read(profile).by_batch_size


def test_files_that_are_removed_while_the_program_runs(tmp_path, folder):
    profile, trace = folder / "experts.json", folder / "trace"
    with serve(tmp_path, OUT, profile, TRACE, trace) as server:
        server.complete([1, 2, 3], 20)
        wait_for("both are there", lambda: profile.exists() and trace.exists() and trace.stat().st_size)
        profile.unlink()
        trace.unlink()
        server.complete([1, 2, 3], 20)
        wait_for("the profile is there again", profile.exists)
        server.stop()
        (line,) = complaints(server.log.read_text(errors="replace"))
    assert str(trace) in line and "trace ended: it has been removed" in line
    assert not trace.exists()
    assert Profile.read(profile).layer_calls > 0


def test_a_trace_that_another_program_writes_is_left_to_it(folder):
    trace = folder / "trace.bin"
    trace.write_bytes(MAGIC + b"another's")
    with trace.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        log = program_run()(TRACE, trace).stderr
    (line,) = complaints(log)
    assert "is taken" in line and str(folder / "trace-2.bin") in line
    assert trace.read_bytes() == MAGIC + b"another's"
    assert_replays(folder / "trace-2.bin")
    program_run()(TRACE, trace)
    assert_replays(trace)


def test_a_trace_of_the_same_session_is_not_replaced(folder):
    """As when a router ends one of its programs and starts another one."""
    trace = folder / "trace"
    variables = {"LLAMA_ARG_MOE_TRACE_OUT": str(trace), "MOE_HOT_SESSION_BEGAN": "1"}
    for _ in range(2):
        program_run(plugin_only=True, **variables)()
    assert_replays(trace)
    assert_replays(folder / "trace-2")


def test_every_program_of_a_router_has_its_trace(tmp_path, folder):
    models = tmp_path / "models"
    models.mkdir()
    for name in ("a", "b"):
        (models / f"{name}.gguf").symlink_to(generated("Q4_K"))
    trace = folder / "trace"
    command = [LAUNCHER, "llama-server", "--models-dir", models, *COMMON_ARGUMENTS, TRACE, trace]
    with start(command, tmp_path, "router", stock_environment()) as router:
        for name in ("a", "b", "a"):
            body = {"model": name, "prompt": [1, 2, 3], "n_predict": 30, "ignore_eos": True}
            assert router._post("/completion", body).json()["tokens_predicted"] == 30
        wait_for("two traces", lambda: len([*folder.iterdir()]) == 2 and all(p.stat().st_size for p in folder.iterdir()))
        router.stop()
        log = router.log.read_text(errors="replace") + router.log.with_name("router.log.out").read_text(errors="replace")
    assert {path.name for path in folder.iterdir()} == {"trace", "trace-2"}
    assert log.count("is taken") == 1
    for path in folder.iterdir():
        assert_replays(path)


def test_what_a_killed_program_left_is_removed(folder):
    left, held = folder / ".experts-AbC123.tmp", folder / ".experts-DeF456.tmp"
    left.write_text("{")
    held.write_text("{")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        program_run()(OUT, folder / "experts.json")
    assert {path.name for path in folder.iterdir()} == {"experts.json", held.name}


def test_modes_are_kept_and_the_longest_names_are_written(folder):
    profile = folder / ("n" * 250 + ".json")
    profile.touch()
    profile.chmod(0o640)
    assert_saved(profile, program_run()(OUT, profile).stderr)
    assert stat.S_IMODE(profile.stat().st_mode) == 0o640
    with profile.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        log = program_run()(OUT, profile).stderr
    assert sum("is taken" in line for line in complaints(log)) == 1
    (beside,) = set(folder.iterdir()) - {profile}
    assert len(beside.name) == 255
    assert_saved(beside, log)
