"""scripts/setup and scripts/fetch-llama refuse what they cannot work with, in one line with exit code 2.

They run on a copy of themselves in a folder that holds nothing else.
"""

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from paths import REPOSITORY
from processes import HANG_S

ARCHIVE = "llama_cpp_python-0.3.36"
HEAD = f"{ARCHIVE}/.git/modules/vendor/llama.cpp/HEAD"
TOOLS = ["bash", "basename", "dirname", "mkdir", "sh", "cat", "cut", "sort", "head", "grep"]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A fresh clone's scripts, without git."""
    shutil.copytree(REPOSITORY / "scripts", tmp_path / "scripts")
    (tmp_path / "ggml-hooks").mkdir()
    shutil.copy(REPOSITORY / "ggml-hooks/pin.env", tmp_path / "ggml-hooks")
    (tmp_path / "build/venv/bin").mkdir(parents=True)
    (tmp_path / "llama.cpp").mkdir()
    return tmp_path


def refusal(checkout: Path, script: str, **environment: str) -> str:
    done = subprocess.run(
        [checkout / "scripts" / script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2, done
    return done.stderr.splitlines()[-1]


def offer_archive(checkout: Path, commit: str) -> bytes:
    """Puts an archive that names `commit` where pip would find one: a pip that copies it stands in for the real one."""
    archive = checkout / f"{ARCHIVE}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in {HEAD: f"{commit}\n", f"{ARCHIVE}/vendor/llama.cpp/CMakeLists.txt": "project(x)\n"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    pip = checkout / "build/venv/bin/python"
    pip.write_text(f'#!/bin/sh\nwhile [ "$1" != -d ]; do shift; done\ncp {archive} "$2"\n')
    pip.chmod(0o755)
    return archive.read_bytes()


def pin(checkout: Path, **values: str) -> None:
    path = checkout / "ggml-hooks/pin.env"
    lines = [line for line in path.read_text().splitlines() if line.split("=")[0] not in values]
    path.write_text("\n".join([*lines, *(f"{key}={value}" for key, value in values.items())]) + "\n")


def test_files_of_unknown_origin_are_refused(checkout):
    (checkout / "llama.cpp/CMakeLists.txt").write_text("project(other)\n")
    line = refusal(checkout, "fetch-llama")
    assert "did not come from this script" in line and "0c1e57098bba43ac29e6e3b677cdceebdd22334f" in line


def test_an_archive_with_another_checksum_is_refused(checkout):
    found = hashlib.sha256(offer_archive(checkout, "0" * 40)).hexdigest()
    line = refusal(checkout, "fetch-llama")
    assert f"SHA-256 is {found}" in line
    assert "expected 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e" in line
    assert not list((checkout / "llama.cpp").iterdir())


def test_an_archive_of_another_commit_is_refused(checkout):
    pin(checkout, SDIST_SHA256=hashlib.sha256(offer_archive(checkout, "deadbeef" * 5)).hexdigest())
    line = refusal(checkout, "fetch-llama")
    assert f"holds llama.cpp {'deadbeef' * 5}" in line and "expected 0c1e57098" in line
    assert not list((checkout / "llama.cpp").iterdir())


def test_the_right_archive_is_unpacked_once(checkout):
    commit = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"
    pin(checkout, SDIST_SHA256=hashlib.sha256(offer_archive(checkout, commit)).hexdigest())
    for _ in range(2):
        subprocess.run([checkout / "scripts/fetch-llama"], check=True, capture_output=True, timeout=HANG_S)
    assert (checkout / "llama.cpp/CMakeLists.txt").read_text() == "project(x)\n"
    assert not (checkout / "llama.cpp/.git").exists()


def test_missing_packages_are_named_in_one_command_for_who_is_not_root(checkout):
    tools = checkout / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))
    (tools / "id").write_text("#!/bin/sh\necho 1000\n")
    (tools / "id").chmod(0o755)
    line = refusal(checkout, "setup", PATH=str(tools))
    assert "run: sudo apt-get install -y" in line
    for package in ["cmake", "ninja-build", "libclang-dev", "python3-venv"]:
        assert package in line
