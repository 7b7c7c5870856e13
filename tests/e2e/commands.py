"""Runs the subcommands in a folder that has the files which their examples name."""

import json
import shutil
from pathlib import Path

from conftest import shipped_model
from launcher import Answer, launch
from paths import REPOSITORY

TRACES = REPOSITORY / "tests/traces"
COMMANDS = ["inspect", "plan", "calibrate", "import", "export", "merge", "report", "replay", "completions"]
PROFILE_FORMATS = ["perf-json", "opt-perf-json", "spark-csv", "counts-csv", "imatrix"]
SHIPPED = {"layers": 6, "n_expert": 32, "n_used": 4}


def prepare(tmp_path: Path) -> Path:
    """Puts into a folder the files that examples name: a model, its profiles in several formats, a trace."""
    (tmp_path / "model.gguf").symlink_to(shipped_model())
    shutil.copy(TRACES / "prose.trace", tmp_path / "routing.trace")
    command(tmp_path, "import", TRACES / "prose.trace", "-o", "experts.json")
    command(tmp_path, "import", TRACES / "code.trace", "-o", "code.json")
    shutil.copy(tmp_path / "experts.json", tmp_path / "chat.json")
    command(tmp_path, "export", "experts.json", "--to", "spark-csv", "-o", "hotness.csv")
    command(tmp_path, "export", "experts.json", "--to", "imatrix", "-o", "imatrix.gguf")
    return tmp_path


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
