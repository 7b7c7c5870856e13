"""Runs the subcommands in a folder that has the files which their examples name."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

from conftest import shipped_model
from launcher import Answer, launch
from paths import REPOSITORY

TRACES = REPOSITORY / "tests/traces"
COMMANDS = ["inspect", "plan", "calibrate", "compare", "import", "export", "merge", "report", "replay", "completions"]
PROFILE_FORMATS = ["perf-json", "opt-perf-json", "spark-csv", "counts-csv", "imatrix"]
SHIPPED = {"layers": 6, "n_expert": 32, "n_used": 4}


@functools.cache
def example_files() -> dict[str, bytes]:
    """The files that examples name: profiles in several formats, a trace."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(TRACES / "prose.trace", folder / "routing.trace")
        command(folder, "import", TRACES / "prose.trace", "-o", "experts.json")
        command(folder, "import", TRACES / "code.trace", "-o", "code.json")
        shutil.copy(folder / "experts.json", folder / "chat.json")
        command(folder, "export", "experts.json", "--to", "spark-csv", "-o", "hotness.csv")
        command(folder, "export", "experts.json", "--to", "imatrix", "-o", "imatrix.gguf")
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def prepare(folder: Path) -> Path:
    """Puts the files that examples name into a folder, and a model."""
    (folder / "model.gguf").symlink_to(shipped_model())
    for name, content in example_files().items():
        (folder / name).write_bytes(content)
    return folder


def environment(folder: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder)}


def answer(folder: Path, *args) -> Answer:
    return launch(*args, cwd=folder, **environment(folder))


def command(folder: Path, *args) -> str:
    """What a command prints that must succeed."""
    given = answer(folder, *args)
    assert given.code == 0, given
    return given.out


def as_json(folder: Path, *args) -> dict:
    return json.loads(command(folder, *args, "--json"))


def counts(path: Path) -> dict[int, dict[int, int]]:
    layers = json.loads(path.read_text())["layers"]
    return {layer["layer"]: dict(layer["experts"]) for layer in layers}
