"""FakeDevice is a fair stand-in for a GPU: llama.cpp uses it, and the answer is the CPU's, bit for bit."""

import re

import pytest

from fake import FAKE_DEVICE, ON_DEVICE, fake_environment, read_stats
from models import generated
from paths import PLUGIN, STOCK_BIN
from probe import DEVICE, assert_meaningful, assert_same_answer, decode, greedy
from processes import process, run
from test_equality import CHANGING_BATCHES

ON_CPU = {"n_threads": 1}
SHORT = [decode(5), greedy(4)]


@pytest.mark.parametrize("cpu_moe", [False, True])
def test_the_answer_is_the_cpus(probe, model_of_two, tmp_path, cpu_moe):
    stock = probe.stock(model_of_two, CHANGING_BATCHES, **ON_CPU)
    environment = fake_environment(stats=tmp_path / "stats")
    ours = probe.faking(model_of_two, CHANGING_BATCHES, environment, cpu_moe=cpu_moe, **ON_DEVICE)
    assert_meaningful(stock)
    assert_same_answer(stock, ours)
    assert FAKE_DEVICE in ours.devices
    stats = read_stats(tmp_path / "stats")
    assert stats["graphs"] > len(CHANGING_BATCHES)
    assert stats["mul_mat_id_nodes"] > 0  # with experts on the CPU too: large batches are offloaded
    assert stats["allocated_bytes"] == 0
