"""The profile while a server runs: written seldom, only when it changed, and always a whole file, even after SIGKILL."""

import contextlib
import itertools
import signal
import threading
import time
from pathlib import Path

import pytest

from experts_json import Profile
from processes import POLL_S, wait_for
from server import recording_server

LEAST_S_BETWEEN_WRITES = 0.9
WRITTEN_WITHIN_S = 15
IDLE_S = 8
N_WRITES = 3


@pytest.fixture
def out_file(tmp_path):
    return tmp_path / "experts.json"


def identity(path: Path):
    """Changes with every write, since a new file is renamed into place."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns
    return None


def layer_calls(path: Path) -> int:
    return Profile.read(path).layer_calls if path.exists() else 0


class Load:
    """One client that asks again and again until the block ends, or the server does."""

    def __init__(self, server):
        self.server = server
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with contextlib.suppress(Exception):  # the server may be killed while it answers
            while not self.ended.is_set():
                self.server.complete([1, 2, 3], 20)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def observe_writes(path: Path, n_writes: int, timeout_s: float) -> list[float]:
    """Times at which the file changed; every state in between is read and checked."""
    times, last = [], identity(path)
    deadline = time.monotonic() + timeout_s
    while len(times) < n_writes:
        assert time.monotonic() < deadline, f"{len(times)} writes in {timeout_s} s"
        now = identity(path)
        if now != last:
            times.append(time.monotonic())
            last = now
            Profile.read(path)
        time.sleep(POLL_S)
    return times


def test_written_while_running_but_not_often(model_of_two, tmp_path, out_file):
    with recording_server(model_of_two, tmp_path, out_file) as server:
        with Load(server):
            times = observe_writes(out_file, N_WRITES, N_WRITES * WRITTEN_WITHIN_S)
        server.stop()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= LEAST_S_BETWEEN_WRITES


def test_not_written_while_idle(model_of_two, tmp_path, out_file):
    with recording_server(model_of_two, tmp_path, out_file) as server:
        answer = server.complete([1, 2, 3], 20)
        n_rows = answer.n_prompt + answer.n_decoded
        wait_for(
            "the profile is up to date",
            lambda: out_file.exists() and Profile.read(out_file).n_rows[0] == n_rows,
            WRITTEN_WITHIN_S,
        )
        before = identity(out_file)
        deadline = time.monotonic() + IDLE_S
        while time.monotonic() < deadline:
            assert identity(out_file) == before, "written although nothing changed"
            time.sleep(POLL_S)
        server.stop()


def test_a_kill_leaves_a_whole_file(model_of_two, tmp_path, out_file):
    with recording_server(model_of_two, tmp_path, out_file) as server, Load(server):
        wait_for("a first profile", lambda: layer_calls(out_file), WRITTEN_WITHIN_S)
        before = layer_calls(out_file)
        observe_writes(out_file, 1, WRITTEN_WITHIN_S)
        server.child.send_signal(signal.SIGKILL)
        server.child.wait()
    assert Profile.read(out_file).layer_calls > before


def test_the_file_of_an_earlier_run_is_replaced(model_of_two, tmp_path, out_file):
    out_file.write_text("what an earlier program left")
    with recording_server(model_of_two, tmp_path, out_file) as server:
        answer = server.complete([1, 2, 3], 5)
        server.stop()
    assert Profile.read(out_file).n_rows[0] == answer.n_prompt + answer.n_decoded
