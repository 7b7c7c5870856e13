"""In steady state a token costs no new graph and no memory: nothing on the device, nothing of the plugin's on the heap.

The heap is counted by libmoe-allocations.so (tests/probe/allocations.c) with the hot lane on the CPU device, so that no
foreign device's allocations are in it. Costs per token are differences of a long and a short run over the same warm-up, in
which llama.cpp keeps its graph: it makes a new one whenever the cache of keys and values grows by 256 cells.

What ggml's CPU backend takes inside each computation (a thread pool for that one computation) is not the plugin's, but
their number is: stock has one CPU graph per token; with the plugin each layer's experts are one and what lies between two
layers is one; where a layer is computed on both sides there is one more, since the hot device is a CPU too.

Graphs are made for every number of requests when it first occurs. Of one token's these are 1 to 4 and soon all known; of a
batch of four sequences they are 1 to 16, and the rare ones still come late."""

import json

import pytest

from hot import ends
from models import generated
from paths import ALLOCATIONS, PLUGIN
from probe import assert_same_answer, decode, greedy
from processes import stock_environment

N_LAYERS, N_EXPERT = 3, 16
SHARES = {"none": 0, "half": N_EXPERT // 2, "all": N_EXPERT}
# Of a token's; stock's own numbers differ by as much, from one run to another with other numbers of digits to print, say.
LARGEST_DIFFERENCE = 0.1
PER_NEW_GRAPH = 20  # allocations, once; 14 at the time of writing
# Of the largest batch; and every layer's hot lane has a graph for each number of them, all cold lanes together one or, when
# their memory has grown, two.
N_REQUESTS = 4 * 4
MOST_GRAPHS = N_REQUESTS * (N_LAYERS + 2)

# Steps that end just after the cells have grown by 256: (warm-up, sequences, a short run, a long run).
ONE = ([decode(2), greedy(255)], (0,), 64, 192)
FOUR = ([decode({0: 1, 1: 2, 2: 1, 3: 1}, "last"), greedy(511, (0, 1, 2, 3))], (0, 1, 2, 3), 4, 60)
WORK = {"one sequence": ONE, "four sequences": FOUR}


def steps_of(work: str, long: bool) -> list:
    warm_up, sequences, *lengths = WORK[work]
    return [*warm_up, greedy(lengths[long], sequences)]


def n_batches(work: str) -> int:
    *_, short, long = WORK[work]
    return long - short


def cases() -> list:
    """With four sequences, none and all are for --full."""
    full = [("four sequences", "none"), ("four sequences", "all")]
    both = [(work, share) for work in WORK for share in SHARES]
    return [pytest.param(*case, marks=pytest.mark.full if case in full else ()) for case in both]


CASES = pytest.mark.parametrize(("work", "share"), cases())
OPTIONS = {"n_threads": 1, "n_seq": 4, "n_ctx": 4096}


def per_token(probe, work: str, environment: dict, **options) -> dict[str, float]:
    """Allocations inside and outside of computations of the CPU backend's, the number of those, and graphs made."""
    counts = []
    for long in (False, True):
        file = probe.folder / f"allocations-{probe.n_runs}"
        preload = {"LD_PRELOAD": str(ALLOCATIONS), "ALLOCATIONS_FILE": str(file)}
        result = probe.faking(generated("Q4_K"), steps_of(work, long), environment | preload, **OPTIONS, **options)
        graphs = sum(end.graphs for end in ends(result.log))
        counts.append(json.loads(file.read_text()) | {"graphs": graphs})
    short, long = counts
    return {name: (long[name] - short[name]) / n_batches(work) for name in short}


@pytest.fixture(scope="module")
def stock(hot):
    """Costs per token of stock, by work; counted once."""
    return {work: per_token(hot.probe, work, stock_environment()) for work in WORK}


def hot_on_cpu(hot, slots: int) -> dict[str, str]:
    profile = hot.profile(generated("Q4_K"), [decode(1), greedy(100)])
    return stock_environment(
        GGML_BACKEND_PATH=str(PLUGIN),
        LLAMA_ARG_MOE_HOT_CACHE=str(profile),
        LLAMA_ARG_MOE_HOT_CACHE_DEVICE="CPU",
        MOE_HOT_TEST_SLOTS=str(slots),
    )


@CASES
def test_a_token_takes_nothing_from_the_heap(hot, stock, work, share):
    stock = stock[work]
    ours = per_token(hot.probe, work, hot_on_cpu(hot, SHARES[share]))
    assert stock["cpu_graphs"] == 1
    more = ours["outside"] - stock["outside"]
    assert abs(more) < LARGEST_DIFFERENCE + PER_NEW_GRAPH * ours["graphs"], "per token, outside of ggml's computations"
    assert ours["inside"] == pytest.approx(stock["inside"] * ours["cpu_graphs"]), "as in each of stock's computations"
    one_side, both_sides = 1 + 2 * N_LAYERS, 1 + 3 * N_LAYERS
    if share == "half":
        assert one_side < ours["cpu_graphs"] <= both_sides
    else:
        assert ours["cpu_graphs"] == one_side


def test_the_count_sees_allocations(stock):
    """Each token of output is a vector of logits of the probe's: were that not seen, no test here would mean anything."""
    assert all(costs["outside"] > 1 for costs in stock.values())


@CASES
def test_no_graph_is_made_and_no_device_memory_taken(hot, work, share):
    model, slots = generated("Q4_K"), SHARES[share]
    profile = hot.profile(model, [decode(1), greedy(100)])
    short, long = (hot.run(model, steps_of(work, long), profile, slots, **OPTIONS) for long in (False, True))
    assert_same_answer(hot.probe.stock(model, steps_of(work, True), **OPTIONS), long)
    assert (long.hits > short.hits) == (slots > 0)
    if (work, share) == ("four sequences", "half"):
        assert short.end.graphs <= long.end.graphs <= MOST_GRAPHS
    else:
        assert long.end.graphs == short.end.graphs
    for counter in ("allocations", "instances", "peak_bytes"):
        assert long.stats[counter] == short.stats[counter], counter
    assert long.stats["mul_mat_id_graphs"] - short.stats["mul_mat_id_graphs"] <= N_LAYERS * n_batches(work)
    assert long.end.copied_mib == short.end.copied_mib
