"""A root folder of its own for programs: the system's libraries and tools, a llama.cpp as its releases are, a model, and nothing
of this checkout."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from conftest import shipped_model
from paths import STOCK_BIN
from processes import HANG_S, run, stock_environment

LLAMA_PROGRAMS = ["llama-server", "llama-completion", "ggml-rpc-server"]
MODEL = "model.gguf"
HOME = "/home/user"
TOOLS = "/usr/bin:/bin"
# Of the system, for reading only.
SYSTEM = ["usr/bin", "usr/lib", "usr/lib64"]
MOUNT = f"""
set -e
root=$1
shift
for folder in {" ".join(SYSTEM)}; do
    [ ! -d "$root/$folder" ] || mount --bind -o ro "/$folder" "$root/$folder"
done
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
exec chroot "$root" "$@"
"""


@cache
def isolation() -> list[str]:
    """What gives a command mounts of its own, which are gone when it ends."""
    for command in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        trial = [*command, "sh", "-c", "mount --bind -o ro /usr/lib /usr/lib && chroot / true"]
        if subprocess.run(trial, capture_output=True, timeout=HANG_S).returncode == 0:
            return command
    return []


def find_libraries_beside(file: Path) -> None:
    """Makes a program or library look for others in its own folder, as those of releases do, instead of where it was built."""
    told = subprocess.run(["readelf", "-d", file], capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    for built_in in re.findall(r"Library r(?:un)?path: \[(.*)\]", told):
        content, old = file.read_bytes(), built_in.encode()
        assert content.count(b"\0" + old + b"\0") == 1, file
        file.write_bytes(content.replace(old, b"$ORIGIN".ljust(len(old), b"\0")))


def copy_llama(folder: Path) -> None:
    """llama.cpp's programs and libraries in one folder, without what they know of the folder that they were built in."""
    folder.mkdir(parents=True)
    for path in STOCK_BIN.iterdir():
        if path.name in LLAMA_PROGRAMS or path.name.startswith("lib"):
            shutil.copy2(path, folder / path.name, follow_symlinks=False)
            if not path.is_symlink():
                find_libraries_beside(folder / path.name)


@dataclass(frozen=True)
class RootFolder:
    path: Path
    llama: str  # the folder of llama.cpp, seen from inside

    @classmethod
    def make(cls, path: Path, llama: str) -> "RootFolder":
        if not isolation():
            pytest.skip("neither root nor a user who may mount: no root folder of its own")
        for name in [*SYSTEM, "proc", "dev", "tmp", "usr/local", HOME[1:]]:
            (path / name).mkdir(parents=True)
        for name in ["bin", "lib", "lib64"]:
            (path / name).symlink_to(f"usr/{name}")
        copy_llama(path / llama[1:])
        shutil.copy(shipped_model(), path / HOME[1:] / MODEL)
        return cls(path, llama)

    def home(self, name: str) -> Path:
        """A file in the user's folder, seen from outside."""
        return self.path / HOME[1:] / name

    def command(self, words: list, path: str = TOOLS, **environment: str) -> list[str]:
        """What runs `words` inside, in the user's folder, with this environment and no other."""
        variables = {"PATH": path, "HOME": HOME, "OMP_WAIT_POLICY": "passive"} | environment
        assignments = [f"{name}={value}" for name, value in variables.items()]
        inner = ["/usr/bin/env", "-i", "-C", HOME, *assignments, *map(str, words)]
        return [*isolation(), "sh", "-c", MOUNT, "sh", str(self.path), *inner]

    def run(self, words: list, log: Path, path: str = TOOLS, **environment: str) -> str:
        """Runs a command inside that must end with 0, and returns what it prints."""
        return run(self.command(words, path, **environment), log, stock_environment())

    def sees(self, path: Path) -> bool:
        """Whether there is such a path inside."""
        done = subprocess.run(self.command(["test", "-e", path]), capture_output=True, timeout=HANG_S)
        return done.returncode == 0

