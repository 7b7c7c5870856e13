"""llama.cpp's own operator tests on our device. They ask about weights in no buffer, which we claim for them only."""

import re

import pytest

from paths import PLUGIN, STOCK_BIN
from probe import DEVICE
from processes import run, stock_environment

CLAIM_UNPLACED = {"MOE_HOT_TEST_CLAIM_UNPLACED": "1"}
# Left out everywhere: three cases of 10^9 weights, each of which takes minutes and 5 GB to set up.
# Left out of the fast part: types whose quantizers are slow, and tensors of some 10^8 weights.
NOT_HUGE = "^(?!.*m=4096)"
QUICK = "^(?!.*(type_a=i|m=4096|m=2880|n_mats=512|n_mats=1024))"
TIMEOUT_S = 1200

COLOUR = re.compile(r"\x1b\[\d+(;\d+)*m")
TOTAL = re.compile(r"(\d+)/(\d+) tests passed")


def operator_tests(tmp_path, op: str, cases: str, **environment: str) -> str:
    command = [STOCK_BIN / "test-backend-ops", "test", "-b", DEVICE, "-o", op, "-p", cases]
    environment = stock_environment(GGML_BACKEND_PATH=str(PLUGIN), **environment)
    return COLOUR.sub("", run(command, tmp_path / "log", environment, TIMEOUT_S))


def n_passed(output: str) -> int:
    """Of our device's cases, all of which must have passed."""
    (passed, total), *others = TOTAL.findall(output)
    assert not others, "more than one device was tested"
    assert passed == total
    return int(passed)


@pytest.mark.parametrize(
    ("op", "cases", "least_cases"),
    [
        pytest.param("ADD_ID", ".", 30, id="ADD_ID"),
        pytest.param("MUL_MAT_ID", QUICK, 700, id="MUL_MAT_ID-quick"),
        pytest.param("MUL_MAT_ID", NOT_HUGE, 900, id="MUL_MAT_ID", marks=pytest.mark.full),
    ],
)
def test_every_case_passes(tmp_path, op, cases, least_cases):
    output = operator_tests(tmp_path, op, cases, **CLAIM_UNPLACED)
    assert f"Backend {DEVICE}: OK" in output
    assert "not supported" not in output
    assert n_passed(output) >= least_cases


@pytest.mark.parametrize("op", ["ADD_ID", "MUL_MAT_ID"])
def test_without_the_switch_nothing_is_claimed(tmp_path, op):
    output = operator_tests(tmp_path, op, QUICK)
    assert output.count("not supported") >= 30
    assert n_passed(output) == 0
