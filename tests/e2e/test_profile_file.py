"""The profile while a server runs: written seldom, only when it changed, and always a whole file, even after SIGKILL."""

import contextlib
import itertools
import signal
import threading
import time
from pathlib import Path

import pytest

from experts_json import Profile
from models import generated
from probe import assert_same_answer, decode
from processes import POLL_S, wait_for
from server import START_UP, recording_server

LEAST_S_BETWEEN_WRITES = 0.9
IDLE_S = 8
N_WRITES = 3


@pytest.fixture
def out_file(tmp_path):
    return tmp_path / "experts.json"


@pytest.fixture
def some_model() -> Path:
    return generated("Q4_K")


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


def observe_writes(path: Path, n_writes: int) -> list[float]:
    """Times at which the file was written; every state that is seen is read and checked."""
    times, last = [], identity(path)

    def is_another() -> bool:
        return identity(path) != last

    for _ in range(n_writes):
        wait_for("it is written", is_another)
        last = identity(path)
        times.append(last[1] / 1e9)
        Profile.read(path)
    return times


def test_written_while_running_but_not_often(some_model, tmp_path, out_file):
    with recording_server(some_model, tmp_path, out_file) as server:
        with Load(server):
            times = observe_writes(out_file, N_WRITES)
        server.stop()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= LEAST_S_BETWEEN_WRITES


def test_not_written_while_idle(some_model, tmp_path, out_file):
    with recording_server(some_model, tmp_path, out_file) as server:
        answer = server.complete([1, 2, 3], 20)
        n_rows = START_UP.n_prompt + answer.n_prompt + answer.n_decoded
        wait_for(
            "the profile is up to date",
            lambda: out_file.exists() and Profile.read(out_file).n_rows[0] == n_rows,
        )
        before = identity(out_file)
        deadline = time.monotonic() + IDLE_S
        while time.monotonic() < deadline:
            assert identity(out_file) == before, "written although nothing changed"
            time.sleep(POLL_S)
        server.stop()


def test_a_kill_leaves_a_whole_file(some_model, tmp_path, out_file):
    with recording_server(some_model, tmp_path, out_file) as server, Load(server):
        wait_for("a first profile", lambda: layer_calls(out_file))
        before = layer_calls(out_file)
        observe_writes(out_file, 1)
        server.child.send_signal(signal.SIGKILL)
        server.child.wait()
    assert Profile.read(out_file).layer_calls > before


def test_the_same_models_earlier_profile_is_replaced(probe, some_model, out_file):
    probe.recording(some_model, [decode(9)], out_file)
    again = probe.recording(some_model, [decode(5)], out_file)
    assert again.profile.n_rows[0] == 5
    assert list(out_file.parent.iterdir()) == [out_file]


def test_another_models_profile_stays(probe, out_file):
    first = probe.recording(generated("Q4_K"), [decode(9)], out_file)
    kept = out_file.read_bytes()
    probe.recording(generated("F16"), [decode(5)], out_file)
    assert out_file.read_bytes() == kept
    (beside,) = set(out_file.parent.iterdir()) - {out_file}
    assert Profile.read(beside).n_rows[0] == 5
    assert Profile.read(beside).raw["model"] != first.profile.raw["model"]


def test_a_file_that_is_no_profile_stays(probe, out_file):
    """Refused with one line; the answer is stock's all the same."""
    out_file.write_text("what somebody else wrote")
    ours = probe.recording(generated("Q4_K"), [decode(9)], out_file)
    assert_same_answer(probe.stock(generated("Q4_K"), [decode(9)]), ours)
    assert out_file.read_text() == "what somebody else wrote"
    assert list(out_file.parent.iterdir()) == [out_file]
    warnings = [line for line in ours.log.splitlines() if line.startswith("moe-hot:") and str(out_file) in line]
    assert any("not replaced" in line for line in warnings)
