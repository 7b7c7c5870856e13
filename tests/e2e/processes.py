"""Child processes that end for sure: each in a process group of its own, killed when its `with` block ends or when
the test run itself dies, each with a deadline. Their environment is ours without what would load or steer the plugin.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

POLL_S = 0.02
# The end of what hangs: far more than anything here takes on a slow machine with other work, so that it decides on no test.
HANG_S = 300
if "--full" in sys.argv:
    HANG_S = 1800  # Vulkan's kernels for several tokens take minutes to be compiled for a device that the processor computes
NOT_INHERITED = ("GGML_", "LLAMA_", "MOE_HOT_", "FAKE_")
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

T = TypeVar("T")


def stock_environment(**extra: str) -> dict[str, str]:
    """No plugin, and no option of llama.cpp that comes from outside.

    Threads sleep at barriers instead of spinning: on a machine with other work a run takes 1 s instead of 10.
    """
    ours = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return ours | {"OMP_WAIT_POLICY": "passive"} | extra


def _die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def process(command: list, log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """Runs a command in the folder of `log`, which gets its stderr, until the block ends; stdout goes to `log`.out."""
    with open(log, "wb") as errors, open(stdout_of(log), "wb") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def stdout_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.out")


def run(command: list, log: Path, environment: dict[str, str], timeout_s: float = HANG_S) -> str:
    """Runs a command to its end, which must be exit code 0, and returns what it wrote to stdout."""
    with process(command, log, environment) as child:
        code = child.wait(timeout=timeout_s)
    assert code == 0, f"exit code {code}: {' '.join(map(str, command))}\n{log.read_text(errors='replace')[-4000:]}"
    return stdout_of(log).read_text(errors="replace")


def wait_for(what: str, condition: Callable[[], T], timeout_s: float = HANG_S) -> T:
    """Polls until the condition gives something true, and returns that."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    """Whether someone listens there, found out without a connection (the RPC server serves one at a time)."""
    listening = "0A"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == listening and int(local.split(":")[1], 16) == port:
            return True
    return False
