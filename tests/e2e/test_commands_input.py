"""The subcommands: what they refuse, what they write, and that the examples in their pages run."""

import json
import random
import re
import shlex
import shutil
import struct
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from models import generated

from commands import COMMANDS, PROFILE_FORMATS, answer, as_json, command, counts, environment, prepare
from conftest import shipped_model
from launcher import assert_refused, launch, write_fake
from paths import LAUNCHER, REPOSITORY
from processes import HANG_S, stock_environment


@pytest.fixture
def here(tmp_path) -> Path:
    return prepare(tmp_path)


def write_bad_files(here: Path) -> None:
    model = shipped_model().read_bytes()
    (here / "cut.gguf").write_bytes(model[: len(model) // 2])
    (here / "head.gguf").write_bytes(model[:1000])
    (here / "plain").write_text("hello\nworld\n")
    (here / "empty").touch()
    other = json.loads((here / "experts.json").read_text())
    other["layers"][0]["experts"] = other["layers"][0]["cold_experts"] = [[40, 1]]
    other["n_expert"] = 64
    (here / "other.json").write_text(json.dumps(other))
    with (here / "huge.json").open("wb") as huge:
        huge.write(b"{")
        huge.truncate((64 << 20) + 1)


# name: the arguments, and what the one line must say.
BAD_INPUTS = {
    "no such file": (["inspect", "none"], ["none", "No such file"]),
    "a folder": (["inspect", "."], ["is a folder"]),
    "a device": (["inspect", "/dev/null"], ["/dev/null", "regular file"]),
    "an empty file": (["inspect", "empty"], ["empty", "is empty"]),
    "neither model nor profile": (["inspect", "plain"], ["plain", "no known format", "spark-csv"]),
    "a header that is cut": (["inspect", "head.gguf"], ["head.gguf", "header ends"]),
    "data that is cut": (["inspect", "cut.gguf"], ["cut.gguf", "cut off"]),
    "huge JSON": (["inspect", "huge.json"], ["huge.json", "larger than 64 MiB"]),
    "no file at all": (["inspect"], ["MODEL|PROFILE"]),
    "an unknown option": (["inspect", "model.gguf", "--moe"], ["--moe"]),
    "plan of a profile": (["plan", "experts.json", "--vram", "8G"], ["experts.json", "GGUF"]),
    "plan of data that is cut": (["plan", "cut.gguf", "--vram", "8G"], ["cut.gguf", "cut off"]),
    "plan without memory": (["plan", "model.gguf"], ["--vram"]),
    "plan with a bare number": (["plan", "model.gguf", "--vram", "12"], ["'12'", "less than 1 MiB", "12GiB"]),
    "plan with a negative size": (["plan", "model.gguf", "--vram", "-1GiB"], ["'-1GiB'", "expected a size such as"]),
    "plan with words": (["plan", "model.gguf", "--vram", "much"], ["'much'", "expected a size such as"]),
    "plan without context": (["plan", "model.gguf", "--vram", "8G", "-c", "0"], ["'0'", "--ctx-size"]),
    "plan with a negative context": (["plan", "model.gguf", "--vram", "8G", "-c", "-1"], ["'-1'", "--ctx-size"]),
    "plan with another model's profile": (
        ["plan", "model.gguf", "--vram", "8G", "--profile", "other.json"],
        ["--profile", "other.json", "another model"],
    ),
    "plan with a model as profile": (
        ["plan", "model.gguf", "--vram", "8G", "--profile", "model.gguf"],
        ["--profile", "is a model"],
    ),
    "plan with a missing profile": (["plan", "model.gguf", "--vram", "8G", "--profile", "no"], ["--profile", "no"]),
    "import of a model": (["import", "model.gguf", "-o", "new"], ["model.gguf", "is a model", "counts-csv"]),
    "import of plain text": (["import", "plain", "-o", "new"], ["plain", "perf-json", "imatrix", "trace"]),
    "import without output": (["import", "experts.json"], ["--output"]),
    "import to a file that is there": (["import", "code.json", "-o", "experts.json"], ["experts.json", "--force"]),
    "import to itself": (["import", "code.json", "-o", "code.json", "--force"], ["code.json", "is the input"]),
    "import to itself by another name": (["import", "code.json", "-o", "./code.json", "--force"], ["is the input"]),
    "import to a folder": (["import", "code.json", "-o", ".", "--force"], ["is a folder"]),
    "import to a device": (["import", "code.json", "-o", "/dev/null", "--force"], ["/dev/null", "regular file"]),
    "import to no folder": (["import", "code.json", "-o", "no/new"], ["no folder no", "existing"]),
    "import to standard output": (["import", "code.json", "-o", "-"], ["--output -", "name of a file"]),
    "export without format": (["export", "experts.json", "-o", "new"], ["--to"]),
    "export to an unknown format": (["export", "experts.json", "--to", "xml", "-o", "new"], ["xml", "spark-csv"]),
    "export of a profile as a trace": (
        ["export", "experts.json", "--to", "route-csv", "-o", "new"],
        ["experts.json", "expected a trace"],
    ),
    "merge of one": (["merge", "experts.json", "-o", "new"], ["PROFILE"]),
    "merge with a negative weight": (
        ["merge", "chat.json", "code.json", "--weights", "-1,2", "-o", "new"],
        ["'-1'", "above 0"],
    ),
    "merge with a weight of zero": (
        ["merge", "chat.json", "code.json", "--weights", "0,2", "-o", "new"],
        ["'0'", "above 0"],
    ),
    "merge with NaN": (["merge", "chat.json", "code.json", "--weights", "nan,2", "-o", "new"], ["'nan'", "above 0"]),
    "merge with words": (["merge", "chat.json", "code.json", "--weights", "a,b", "-o", "new"], ["'a'", "above 0"]),
    "merge with too few weights": (
        ["merge", "chat.json", "code.json", "--weights", "2", "-o", "new"],
        ["1 weights for 2"],
    ),
    "merge of two models": (
        ["merge", "chat.json", "other.json", "-o", "new"],
        ["other.json", "64 experts", "one model"],
    ),
    "merge into an input": (
        ["merge", "chat.json", "code.json", "-o", "code.json", "--force"],
        ["code.json", "is the input"],
    ),
    "report of a model": (["report", "model.gguf", "-o", "new"], ["model.gguf", "is a model"]),
    "report with a profile as trace": (
        ["report", "experts.json", "--trace", "code.json", "-o", "new"],
        ["--trace", "code.json"],
    ),
    "report with another model's trace": (
        ["report", "other.json", "--trace", "routing.trace", "-o", "new"],
        ["routing.trace", "expert 40"],
    ),
    "report into the trace": (
        ["report", "experts.json", "--trace", "routing.trace", "-o", "routing.trace", "--force"],
        ["is the input"],
    ),
    "calibrate with a model that is not there": (["calibrate", "--model", "nothing.gguf"], ["nothing.gguf"]),
    "calibrate with a model that is none": (["calibrate", "--model", "experts.json"], ["experts.json"]),
    "calibrate with another program": (
        ["calibrate", "--model", "model.gguf", "--program", "no-bench"],
        ["--program", "no-bench", "no such program"],
    ),
    "calibrate with no threads": (["calibrate", "-t", "0"], ["'0'", "--threads"]),
    "calibrate with a negative bandwidth": (["calibrate", "--gpu-bandwidth", "-5"], ["'-5'", "GB/s"]),
    "calibrate with NaN": (["calibrate", "--bus-bandwidth", "nan"], ["'nan'", "GB/s"]),
    "calibrate without end": (["calibrate", "--layer-overhead", "inf"], ["'inf'", "microseconds"]),
    "an unknown shell": (["completions", "tcl"], ["tcl", "bash"]),
    "no shell": (["completions"], ["SHELL"]),
}


def versions(folder: Path) -> dict[str, tuple]:
    """Which version of each file is there."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items() if name != "config"}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_refused_with_one_line_and_nothing_is_lost(here, name):
    write_bad_files(here)
    before = versions(here)
    args, said = BAD_INPUTS[name]
    assert_refused(answer(here, *args), *said)
    assert versions(here) == before


def test_a_model_with_a_missing_part_is_refused(tmp_path):
    whole = generated("split")
    parts = sorted(whole.parent.glob(re.sub(r"-\d{5}-of-", "-?????-of-", whole.name)))
    assert len(parts) == 3
    for part in parts:
        shutil.copy(part, tmp_path)
    first, second, _ = (tmp_path / part.name for part in parts)
    assert as_json(tmp_path, "inspect", first)["expert_bytes"] > 0
    for words in (["inspect"], ["plan", "--vram", "8G"]):
        assert_refused(answer(tmp_path, *words, second), second.name, "one of 3 parts")
    shutil.copy(first, tmp_path / "renamed.gguf")
    assert_refused(answer(tmp_path, "inspect", "renamed.gguf"), "renamed.gguf", "one of 3 parts")
    second.unlink()
    assert_refused(answer(tmp_path, "inspect", first), second.name, "cannot be read")


def test_a_model_without_experts_is_refused(tmp_path):
    path = tmp_path / "dense.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("output.weight", np.zeros((4, 32), dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    for words in (["inspect"], ["plan", "--vram", "8G"]):
        assert_refused(answer(tmp_path, *words, path), "dense.gguf", "has no experts")


def test_no_bytes_make_a_command_panic(here):
    """Files of every format with some bytes changed or missing: an answer, or one line and exit code 2."""
    rng = random.Random(1)
    sources = {
        "model": shipped_model().read_bytes()[:300_000],
        **{to: None for to in PROFILE_FORMATS},
        "route-csv": None,
        "trace": (here / "routing.trace").read_bytes()[:20_000],
    }
    for to in sources:
        if sources[to] is None:
            command(here, "export", "routing.trace", "--to", to, "-o", f"a.{to}")
            sources[to] = (here / f"a.{to}").read_bytes()
    interesting = [b"\xff" * 8, b"\x00" * 8, b"-1", b"9" * 20, b"nan", struct.pack("<Q", 1 << 62), b"\n\n", b",,,"]
    for to, good in sources.items():
        for _ in range(12):
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(min(len(bad), 2000))
                piece = rng.choice(interesting)
                bad[at : at + len(piece)] = piece
            (here / "bad").write_bytes(bad[: rng.choice([len(bad), rng.randrange(1, len(bad))])])
            given = answer(here, "inspect", "bad")
            assert given.code in (0, 2) and "panicked" not in given.err, (to, given)
            assert given.code == 0 or len(given.err.splitlines()) == 1, (to, given)


# ---- output


def test_force_replaces_a_file_whole_and_leaves_no_other(here):
    before = {path.name for path in here.iterdir()}
    command(here, "import", "code.json", "-o", "chat.json", "--force")
    assert counts(here / "chat.json") == counts(here / "code.json")
    assert {path.name for path in here.iterdir()} == before
    (here / "link.json").symlink_to("chat.json")
    command(here, "import", "experts.json", "-o", "link.json", "--force")
    assert (here / "link.json").is_symlink() and counts(here / "chat.json") == counts(here / "experts.json")


def test_a_reader_that_has_gone_is_no_failure_and_a_full_disk_is(here):
    command_line = [str(LAUNCHER), "inspect", "experts.json"]
    with subprocess.Popen(command_line, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        errors = child.stderr.read()
        assert (child.wait(HANG_S), errors) == (0, b"")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command_line, cwd=here, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr
    closed = subprocess.run(
        f"{shlex.join(command_line)} >&-", shell=True, cwd=here, capture_output=True, timeout=HANG_S
    )
    assert (closed.returncode, closed.stderr) == (0, b"")


# ---- names, help, completions, examples


def test_a_program_with_the_name_of_a_command_is_started_by_its_path(tmp_path):
    write_fake(tmp_path / "plan")
    assert launch("./plan", "-m", "x", cwd=tmp_path).started["args"][-2:] == ["-m", "x"]
    assert_refused(launch("plan", "-m", "x", cwd=tmp_path), "'-m'")
    assert "./plan" in launch("--help").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_a_valid_script(tmp_path, shell):
    script = tmp_path / f"moe-hot.{shell}"
    script.write_text(command(tmp_path, "completions", shell))
    assert all(name in script.read_text() for name in COMMANDS)
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", script], check=True, timeout=HANG_S)


def test_bash_completes_commands(tmp_path):
    script = tmp_path / "moe-hot.bash"
    script.write_text(command(tmp_path, "completions", "bash"))
    asked = "COMP_WORDS=(moe-hot ins); COMP_CWORD=1; _moe__hot moe-hot ins moe-hot"
    typed = f'source {script}; {asked}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.split() == ["inspect"]


def examples(text: str) -> list[str]:
    return re.findall(r"^ +(moe-hot .*)$", text.partition("Examples:")[2], re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_run(here, name):
    said = command(here, name, "--help")
    lines = examples(said)
    assert lines, said
    for folder in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (here / folder).mkdir(parents=True)
    for line in lines:
        if " -o " in line and "--force" not in line:
            (here / re.search(r"-o (\S+)", line)[1]).unlink(missing_ok=True)
        shell(here, line)


def shell(folder: Path, line: str) -> str:
    """Runs a line as a user would type it, with our own moe-hot."""
    ours = stock_environment(**environment(folder))
    typed = f'moe-hot() {{ {shlex.quote(str(LAUNCHER))} "$@"; }}\n{line}'
    done = subprocess.run(["bash", "-c", typed], cwd=folder, env=ours, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


def test_examples_of_the_page_give_what_it_shows(tmp_path):
    """Blocks of `console` are compared word for word; `shell-session` has figures of a machine and only runs."""
    page = (REPOSITORY / "docs/commands.md").read_text()
    blocks = re.findall(r"^```(console|shell-session)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= len(COMMANDS)
    (tmp_path / "tests").symlink_to(REPOSITORY / "tests")
    shown = set()
    for kind, block in blocks:
        for line, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            shown.add(line.split()[1])
            said = shell(tmp_path, line)
            if kind == "console":
                assert said.rstrip() == output.rstrip(), line
    assert shown >= set(COMMANDS)
