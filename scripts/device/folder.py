"""The packed folder: where its programs are, and how they are run: nothing of ours or of llama.cpp's in their environment but what
a run is given, and a deadline for each."""

import contextlib
import ctypes
import glob
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from device.budget import Budget, Skipped

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / "bin"
PLUGIN = BIN / "libggml_moe_hot.so"
TRACES = ROOT / "traces"
CUDA_BACKEND = BIN / "libggml-cuda.so"
# What the CUDA backend wants of the machine.
CUDA_LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13")
# What the programs want besides glibc, packed for machines that lack it.
FALLBACK = ROOT / "fallback"
NOT_INHERITED = ("GGML_", "LLAMA_", "MOE_HOT_", "MOE_PROBE_", "FAKE_")
# Which Vulkan device is used is the machine's business.
INHERITED = ("GGML_VK_VISIBLE_DEVICES",)
SERVER_START_S = 20
# How long a program may take to end when it is asked to.
END_S = 10
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def end_with_parent() -> None:
    """What is run here ends with this script, however that ends. It is asked to, so that it can end what it has started."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Failed(Exception):
    """A program ended otherwise than it should: with which exit code, and what its last line says."""

    def __init__(self, words: str, code: int | None = None, last_line: str = ""):
        super().__init__(words)
        self.code, self.last_line = code, last_line


def folders_with_cuda() -> list[str]:
    """Where the CUDA libraries of version 13 usually are: system, toolkit, Python's packages."""
    patterns = [
        "/usr/local/cuda*/lib64",
        "/usr/local/cuda*/targets/x86_64-linux/lib",
        "/opt/cuda/lib64",
        "/usr/lib/x86_64-linux-gnu",
    ]
    patterns += [f"{path}/nvidia/*/lib" for path in sys.path if path.endswith("-packages")]
    patterns += [
        f"{prefix}/lib/python3*/*-packages/nvidia/*/lib" for prefix in ("/usr", "/usr/local", "/opt/*/.venv", "/opt/*")
    ]
    listed = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return [folder for folder in listed if folder] + [
        folder for pattern in patterns for folder in sorted(glob.glob(pattern))
    ]


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_cuda_libraries() -> tuple[list[str], list[str]]:
    """Which CUDA libraries are nowhere to be found, and the folders of those that the system's loader does not find itself."""
    missing, folders = [], []
    for library in CUDA_LIBRARIES:
        found = next((folder for folder in folders_with_cuda() if Path(folder, library).exists()), None)
        if found:
            folders.append(found)
        elif not can_load(library):
            missing.append(library)
    return missing, list(dict.fromkeys(folders))


def fallback_folder(into: Path) -> Path:
    """A folder with those of the packed libraries that this machine lacks."""
    into.mkdir(exist_ok=True)
    for library in FALLBACK.iterdir() if FALLBACK.exists() else ():
        if not can_load(library.name) and not (into / library.name).exists():
            (into / library.name).symlink_to(library)
    return into


class Programs:
    """Runs the packed programs, within the budget."""

    def __init__(self, work: Path, budget: Budget):
        self.work = work
        self.budget = budget
        _, cuda = missing_cuda_libraries() if CUDA_BACKEND.exists() else ([], [])
        inherited = os.environ.get("LD_LIBRARY_PATH", "")
        folders = [str(BIN), str(fallback_folder(work / "libraries")), *cuda, *([inherited] if inherited else [])]
        self.base = {
            name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED) or name in INHERITED
        } | {"LD_LIBRARY_PATH": ":".join(folders), "MOE_PROBE_BACKENDS": str(BIN), "GGML_NO_BACKTRACE": "1"}
        self.rpc_server: RpcServer | None = None

    def environment(self, **extra: object) -> dict[str, str]:
        return self.base | {name: str(value) for name, value in extra.items()}

    def run(
        self,
        command: list,
        environment: dict[str, str] | None = None,
        accepts: tuple[int, ...] = (0,),
        heard: dict[str, Callable[[], None]] | None = None,
    ) -> tuple[str, str, int]:
        """Runs a command to its end and returns its output, its errors, and the most memory that it had, in bytes. It is
        ended when there is no time left. `heard`: what to call, in this order, as soon as its errors have such words."""
        words = [str(word) for word in command]
        awaited = list((heard or {}).items())
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=environment or self.base,
                cwd=self.work,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            try:
                memory = self._wait(child, words, lambda: listen(errors.fileno(), awaited))
            finally:
                end(child)
            for file in (output, errors):
                file.seek(0)
            said = errors.read()
            if child.returncode not in accepts:
                last_line = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
                raise Failed(
                    f"exit code {child.returncode}: {below(words)}: {last_words(said)}", child.returncode, last_line
                )
            return output.read(), said, memory

    def _wait(self, child: subprocess.Popen, words: list[str], listen: Callable[[], None]) -> int:
        ended = 0
        while not ended:
            listen()
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
            if ended:
                child.returncode = os.waitstatus_to_exitcode(status)
                return usage.ru_maxrss * 1024
            if self.budget.left_s <= 0:
                end(child)
                if self.rpc_server:
                    self.rpc_server.restart()
                raise Skipped(f"{Path(words[0]).name} was still running when the time for it was over")
            time.sleep(0.01)
        return 0

    @contextlib.contextmanager
    def server(self, n_threads: int) -> Iterator[str]:
        """An RPC server that computes on this machine's processor."""
        self.rpc_server = RpcServer(self.work, self.base, n_threads)
        try:
            yield self.rpc_server.endpoint
        finally:
            self.rpc_server.stop()


def listen(file: int, awaited: list[tuple[str, Callable[[], None]]]) -> None:
    """Calls what the next words are awaited for, once they are there."""
    if awaited and awaited[0][0].encode() in os.pread(file, os.fstat(file).st_size, 0):
        awaited.pop(0)[1]()


def end(child: subprocess.Popen) -> None:
    """Ends a program that still runs. First it is asked to: `moe-hot compare` has children in groups of their own."""
    if child.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


class RpcServer:
    """Serves one program at a time; one that is ended while it computes leaves it busy, so that it has to be started again."""

    def __init__(self, work: Path, environment: dict[str, str], n_threads: int):
        self.log, self.environment, self.n_threads = work / "rpc-server.log", environment, n_threads
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self._start()

    def _start(self) -> None:
        command = [BIN / "ggml-rpc-server", "-H", "127.0.0.1", "-p", self.port, "-d", "CPU", "-t", self.n_threads]
        with open(self.log, "w") as log:
            self.child = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.log.parent,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        deadline = time.monotonic() + SERVER_START_S
        while not listens(self.port):
            if self.child.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise Failed(f"ggml-rpc-server does not listen: {last_words(self.log.read_text())}")
            time.sleep(0.05)

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()


def listens(port: int) -> bool:
    """Found out without a connection: the server serves one at a time."""
    listening = "0A"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == listening and int(local.split(":")[1], 16) == port:
            return True
    return False


def below(words: list[str]) -> str:
    """A command line without the folders of this machine."""
    shortened = [word.replace(f"{ROOT}/", "") for word in words]
    return shlex.join(Path(word).name if word.startswith("/") else word for word in shortened)


def last_words(text: str) -> str:
    """What a program that has failed says of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in ("error", "assert", "fail", "abort", "crash"))]
    return " / ".join((telling or lines)[-3:])[-400:]
