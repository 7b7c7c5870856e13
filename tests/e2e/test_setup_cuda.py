"""scripts/setup --cuda: what it refuses and what it fetches. That it builds is shown by MOE_HOT_TEST_CUDA=1 scripts/test."""

import re
import subprocess

import pytest

import paths
from processes import HANG_S

LLAMA_CPP_WANTS = {"nvcc", "crt", "runtime", "cccl"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cuda", "--arch", "hopper"], "--arch hopper: expected a compute capability"),
        (["--cuda", "--arch", "9.0"], "--arch 9.0: expected a compute capability"),
        (["--cuda", "--arc", "90"], "expected --cuda, or --cuda --arch"),
        (["--cuda", "90"], "expected no argument, --cuda"),
    ],
)
def test_bad_arguments_get_one_line(arguments, expected):
    done = subprocess.run([paths.REPOSITORY / "scripts/setup", *arguments], timeout=HANG_S, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert expected in line


def test_every_package_is_pinned_by_its_hash():
    text = (paths.REPOSITORY / "ggml-hooks/cuda.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    named = [re.fullmatch(r"nvidia-(?:cuda-)?(\w+)==13\.0[.\d]+ +--hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(named) and {match[1] for match in named} >= LLAMA_CPP_WANTS
