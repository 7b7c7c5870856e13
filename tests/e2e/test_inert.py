"""Loading the plugin without any of our options changes neither stock's answer (repacking included) nor what a token
costs. Costs are counted; the speed itself is measured with --full."""

import math
import statistics

import pytest

from models import generated
from paths import PLUGIN
from probe import assert_same_answer, decode, differ, greedy
from processes import stock_environment
from test_equality import CHANGING_BATCHES
from test_hot_steady import LARGEST_DIFFERENCE, WORK, per_token

LEAST_SPEED_RATIO = 0.90
PAIRS_PER_ROUND, MOST_ROUNDS = 20, 5
# prompts short enough to be run without an interruption now and then, on a machine that does other things too
PROMPT_AND_DECODE = [*[decode(48, "last") for _ in range(8)], greedy(100)]


@pytest.mark.parametrize("variant", ["Q4_0", "Q4_K", "F16"])
@pytest.mark.parametrize("load_mode", ["mmap", "none"])
def test_the_answer_is_stocks(probe, variant, load_mode):
    model = generated(variant)
    stock = probe.stock(model, CHANGING_BATCHES, repack=True, load_mode=load_mode)
    ours = probe.inert(model, CHANGING_BATCHES, repack=True, load_mode=load_mode)
    assert_same_answer(stock, ours)
    if variant != "F16":  # stock does repack these, so the plugin has not taken them
        assert differ(stock, probe.stock(model, CHANGING_BATCHES, load_mode=load_mode))


def test_the_plugin_takes_nothing_and_writes_nothing(probe):
    ours = probe.inert(generated("Q4_0"), CHANGING_BATCHES, repack=True)
    assert "MoEHot model buffer size" not in ours.log
    assert {path.name for path in ours.folder.iterdir()} == {"run.json", "log", "log.out", "result.json", "logits.bin"}


@pytest.mark.parametrize("work", WORK)
def test_a_token_costs_what_stocks_does(probe, work):
    """As many computations of the CPU backend's, and as many allocations inside and outside of them."""
    inert = stock_environment(GGML_BACKEND_PATH=str(PLUGIN))
    stock, ours = (per_token(probe, work, environment, repack=True) for environment in (stock_environment(), inert))
    assert stock["cpu_graphs"] == ours["cpu_graphs"] == 1
    for where in ("inside", "outside"):
        assert ours[where] == pytest.approx(stock[where], abs=LARGEST_DIFFERENCE), where


def prompt_time_us(result) -> float:
    return min(batch["microseconds"] for batch in result.batches if batch["n_tokens"] > 1)


def token_time_us(result) -> float:
    return statistics.median(batch["microseconds"] for batch in result.batches if batch["n_tokens"] == 1)


def median_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median, from order statistics (no assumption on the distribution)."""
    n = len(values)
    tail, rank = 0.0, 0
    while tail + math.comb(n, rank) / 2**n <= 0.025:
        tail += math.comb(n, rank) / 2**n
        rank += 1
    ordered = sorted(values)
    return ordered[rank - 1], ordered[n - rank]


def run_pairs(probe, model) -> list[tuple]:
    """(stock, plugin loaded) runs, alternated."""
    pairs = []
    for pair in range(PAIRS_PER_ROUND):
        order = (probe.stock_again, probe.inert) if pair % 2 == 0 else (probe.inert, probe.stock_again)
        results = {run: run(model, PROMPT_AND_DECODE, repack=True, n_threads=1) for run in order}
        pairs.append((results[probe.stock_again], results[probe.inert]))
    return pairs


def least_speed(pairs: list[tuple], what: str) -> float:
    """The lower end of the interval, which is printed."""
    time_us = {"decode": token_time_us, "prompt": prompt_time_us}[what]
    ratios = [time_us(stock) / time_us(ours) for stock, ours in pairs]
    low, high = median_interval(ratios)
    print(
        f"{what} speed, plugin loaded / stock: median {statistics.median(ratios):.3f}, "
        f"95 % interval {low:.3f} to {high:.3f}, {len(ratios)} pairs"
    )
    return low


@pytest.mark.full
def test_the_speed_is_stocks(probe, capsys):
    """The whole 95 % interval of the median ratio must lie above the bar. A noisy machine gets more pairs, all of which
    count, until that is shown or there have been enough."""
    pairs, lows = [], {"decode": 0.0, "prompt": 0.0}
    with capsys.disabled():
        print()
        for _ in range(MOST_ROUNDS):
            pairs += run_pairs(probe, generated("Q4_K"))
            lows = {what: least_speed(pairs, what) for what in lows}
            if min(lows.values()) >= LEAST_SPEED_RATIO:
                break
    assert min(lows.values()) >= LEAST_SPEED_RATIO, lows
