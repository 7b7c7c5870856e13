"""Profiles that nobody should trust: each is refused with exit code 2 and its own line, and none is read or followed
without an end."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher import Answer, assert_refused, launch, write_fake
from paths import LAUNCHER, PLUGIN, REPOSITORY
from processes import HANG_S

CORPUS = REPOSITORY / "tests/hostile"
EXPECTED = json.loads((CORPUS / "expected.json").read_text())
SCHEMA = "llama.cpp.moe_layer_perf.v1"
NOBODY = "nobody"


@pytest.fixture
def program(tmp_path) -> Path:
    return write_fake(tmp_path / "llama-fake")


def refuse(program: Path, profile: Path, *said: str) -> str:
    """The message about a profile, without its path."""
    answer = launch(program, "--moe-hot-cache", profile)
    assert_refused(answer, os.fsencode(profile).decode(errors="replace"), "expected", *said)
    return answer.err.replace(str(profile), "")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_hostile_file_is_refused_with_its_own_line(program, name):
    refuse(program, CORPUS / name, *EXPECTED[name]["says"])


def test_every_fault_has_another_message(program):
    messages = {name: refuse(program, CORPUS / name) for name in EXPECTED}
    assert len(set(messages.values())) == len(EXPECTED), messages


def test_every_file_of_the_corpus_is_expected():
    assert {path.name for path in CORPUS.iterdir()} == {*EXPECTED, "expected.json"}


@pytest.mark.parametrize("bracket", ["[", "{", "[["])
def test_what_follows_too_many_brackets_is_not_read(program, tmp_path, bracket):
    """A TiB, which no machine reads in time, and none has to store."""
    path = tmp_path / "brackets.json"
    path.write_text(bracket * 10_000)
    os.truncate(path, 1 << 40)
    refuse(program, path, "larger than 64 MiB")


def test_60_mb_of_brackets_are_not_followed(program, tmp_path):
    path = tmp_path / "brackets.json"
    path.write_text("[" * 60_000_000)
    refuse(program, path, "nested too deeply")


def test_counts_that_overflow_together_are_refused(program, tmp_path):
    experts = [[expert, 2**53] for expert in range(2049)]
    path = tmp_path / "sum.json"
    path.write_text(json.dumps({"schema": SCHEMA, "layers": [{"layer": 4, "experts": experts}]}))
    refuse(program, path, "layer 4", "2^64")


def test_only_regular_files_are_opened(program, tmp_path):
    folder, pipe, link, dangling, loop = (tmp_path / name for name in ("folder", "pipe", "link", "dangling", "loop"))
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(CORPUS / "empty.json")
    dangling.symlink_to(tmp_path / "nothing")
    refuse(program, tmp_path / "missing.json", "no such file")
    refuse(program, folder, "is a folder")
    refuse(program, pipe, "is a pipe, socket or device")
    refuse(program, link, "is empty")
    loop.symlink_to(loop)
    refuse(program, loop, "symbolic links")
    refuse(program, dangling, f'"{tmp_path / "nothing"}", where nothing is')


@pytest.mark.parametrize("name", [b"not-\xff-utf8.json", b"two\nlines.json"])
def test_an_odd_name_still_takes_one_line(program, tmp_path, name):
    path = os.fsencode(tmp_path) + b"/" + name
    Path(os.fsdecode(path)).write_text("")
    done = launch(program, "--moe-hot-cache", os.fsdecode(path))
    assert_refused(done, "is empty", "not-" if name.startswith(b"not") else "two\\nlines.json")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as somebody else")
def test_a_file_that_may_not_be_read_is_refused(tmp_path_factory):
    """As another user, in a folder that this user can reach."""
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/moe-hot-XXXXXX"], text=True).strip())
    try:
        folder.chmod(0o755)
        launcher = shutil.copy(LAUNCHER, folder / "moe-hot")
        shutil.copy(PLUGIN, folder)
        profile = folder / "secret.json"
        profile.write_text("{}")
        profile.chmod(0o600)
        command = [launcher, "true", "--moe-hot-cache", profile]
        done = subprocess.run(command, user=NOBODY, capture_output=True, text=True, cwd="/", timeout=HANG_S)
        assert_refused(Answer(done.returncode, done.stdout, done.stderr), str(profile), "Permission denied", "expected")
    finally:
        shutil.rmtree(folder)
