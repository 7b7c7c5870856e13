"""The patched programs (build/patched/bin), and stock through the launcher to compare them with."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import paths
from processes import HANG_S, stock_environment

PROGRAMS = ["llama-server", "llama-cli", "llama-completion", "llama-bench"]
HEADING = "----- expert cache params (moe-hot) -----"
COMPLETION = ["-no-cnv", "--no-warmup", "-t", 1, "-c", 512, "--seed", 1, "--temp", 0, "-p", "The house", "--no-repack"]

# Where they are required their absence fails each test.
needs_build = pytest.mark.skipif(
    not (paths.PATCHED_BIN / "llama-server").exists() and os.environ.get("MOE_HOT_REQUIRE_PATCHED") != "1",
    reason=f"{paths.PATCHED_BIN} holds no patched programs: cargo build --release --features llama",
)


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line that it ended with."""
        (line,) = (line for line in self.err.splitlines() if line.startswith("moe-hot: "))
        return line


def run(command: list, environment: dict[str, str] | None = None, cwd: Path | None = None) -> Answer:
    done = subprocess.run(
        [str(word) for word in command],
        env=stock_environment() if environment is None else environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=cwd,
        timeout=HANG_S,
    )
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def patched(program: str, *arguments, cwd: Path | None = None, **environment: str) -> Answer:
    return run([paths.PATCHED_BIN / program, *arguments], stock_environment(**environment), cwd)
