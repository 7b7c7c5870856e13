"""Experts of every type that ggml-cpu multiplies: stock's answer, bit for bit."""

import re

import pytest

from models import EXPERTS, generated
from paths import REPOSITORY
from probe import assert_meaningful, assert_same_answer, decode
from results import record_result

ARCHITECTURE = "qwen3moe-small"
N_EXPERT_TENSORS = 3
CPU_TYPES = REPOSITORY / "llama.cpp/ggml/src/ggml-cpu/ggml-cpu.c"
BASE_TYPES = ("F32", "Q8_0")  # other tensors have them too
# 20 tokens, each with 2 of 4 experts: about 10 rows per expert, which K- and IQ-types compute in tiles
STEPS = [decode(1), decode(8), decode(20), decode(1)]

TYPES = [
    *("F32", "F16", "BF16"),
    *("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
]


def types_that_ggml_cpu_multiplies() -> set[str]:
    """Those with a dot product in the pinned revision's table."""
    table = CPU_TYPES.read_text().partition("type_traits_cpu[GGML_TYPE_COUNT] = {")[2].partition("\n};")[0]
    entries = re.findall(r"\[GGML_TYPE_(\w+)\] = \{(.*?)\n    \}", table, re.DOTALL)
    return {name for name, entry in entries if re.search(r"\.vec_dot +=", entry)}


def tensors_of_type(log: str, type_name: str) -> int:
    """As the loader counts them."""
    match = re.search(rf"- type +{type_name}: +(\d+) tensors", log, re.IGNORECASE)
    return int(match[1]) if match else 0


def test_no_type_is_missing():
    assert sorted(TYPES) == sorted(types_that_ggml_cpu_multiplies())


@pytest.mark.parametrize("type_name", TYPES)
def test_the_answer_is_stocks(probe, type_name):
    model = generated(f"{EXPERTS}{type_name}", ARCHITECTURE)
    stock = probe.stock(model, STEPS)
    ours = probe.recording(model, STEPS)
    n_tensors = tensors_of_type(ours.log, type_name)
    assert n_tensors >= N_EXPERT_TENSORS if type_name in BASE_TYPES else n_tensors == N_EXPERT_TENSORS
    assert_meaningful(stock)
    assert_same_answer(stock, ours)
    assert ours.profile.calls == {0: len(STEPS)}
    assert ours.profile.blocks == {0: "gate_up_down"}
    record_result("qwen3moe", type_name, "--cpu-moe", "equal")
