"""Exactness while experts are swapped: at the highest rate, by every rule for misses, the answer is stock's bit for bit."""

import pytest

from experts_json import Profile
from learning import MISS, RULES, UPDATE_RATE, Learning, assert_swapped, mixed
from models import EXPERTS, generated
from probe import assert_meaningful, assert_same_answer, decode, greedy, threads
from shapes import SHAPES
from test_hot_perplexity import LARGEST_DIFFERENCE, LAUNCHED, STOCK, TEXTS, read, score
from test_programs import printed_perplexity

STEPS = [decode(1), *mixed(40), decode(40), *mixed(20)]
GREEDY = [decode(1), *mixed(30), greedy(60), *mixed(10), greedy(60)]


@pytest.fixture(scope="session")
def learning(hot) -> Learning:
    return Learning(hot)


def assert_same_while_swapping(learning, model, steps, rule: str, **options):
    stock = learning.hot.probe.stock(model, steps, **options)
    profile = learning.hot.profile(model, steps, **options)
    ours = learning.run(model, steps, profile, rule, **options)
    assert_meaningful(stock)
    assert_same_answer(stock, ours)
    assert_swapped(ours)


def cases() -> list:
    """Every shape with every rule; `copy`, which swaps most, of each, the others with --full."""
    marks = {rule: () if rule == "copy" else pytest.mark.full for rule in RULES}
    return [pytest.param(name, rule, marks=marks[rule]) for name in SHAPES for rule in RULES]


@pytest.mark.parametrize(("name", "rule"), cases())
def test_every_shape(learning, name, rule):
    shape = SHAPES[name]
    assert_same_while_swapping(learning, generated("F16", shape.architecture), STEPS, rule, **shape.options)


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("name", "type_name"), [*((name, "Q4_K") for name in SHAPES), ("gpt-oss", "MXFP4")])
def test_every_shape_quantized(learning, name, type_name, rule):
    shape = SHAPES[name]
    model = generated(f"{EXPERTS}{type_name}", shape.architecture)
    assert_same_while_swapping(learning, model, STEPS, rule, **shape.options)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_and_mixed_batches(learning, model_of_two, rule):
    assert_same_while_swapping(learning, model_of_two, GREEDY, rule)


SEQUENCES = [
    decode({0: 1, 1: 1, 2: 1, 3: 1}, "last"),
    *[decode({0: 1 + i % 5, 1: 1, 2: 1 + i % 17, 3: 1 + i % 3}, seed=i) for i in range(20)],
    greedy(40, sequences=(0, 1, 2, 3)),
    *mixed(40),
    greedy(20, sequences=(2, 0)),
    decode({1: 9, 3: 40}),
    greedy(20, sequences=(0, 1, 2, 3)),
]


@pytest.mark.parametrize("rule", RULES)
def test_four_sequences(learning, model_of_two, rule):
    assert_same_while_swapping(learning, model_of_two, SEQUENCES, rule, n_seq=4, n_ctx=4096)


AT_ONCE = [
    decode(20, context=0),
    decode(9, context=1),
    threads([*mixed(40, context=0), greedy(30, context=0)], [greedy(30, context=1), *mixed(40, context=1)]),
    greedy(8, context=0),
    greedy(8, context=1),
]


@pytest.mark.parametrize("rule", RULES)
def test_two_contexts_in_two_threads(learning, model_of_two, rule):
    """They look for residents, ask for others and copy over the same slots at once."""
    assert_same_while_swapping(learning, model_of_two, AT_ONCE, rule, contexts=2, n_threads=1)


@pytest.mark.parametrize(("rule", "rate"), [(rule, rate) for rule in RULES for rate in (0.001, 1)])
def test_at_a_given_rate(learning, rule, rate):
    """Few slots; every miss may still be copied under `copy`."""
    model, slots = generated("Q4_K"), 4
    profile = learning.hot.profile(model, GREEDY)
    environment = {UPDATE_RATE: rate, MISS: rule}
    ours = learning.hot.run(model, GREEDY, profile, slots, environment=environment)
    assert_same_answer(learning.hot.probe.stock(model, GREEDY), ours)
    assert ours.complaints == []
    assert ours.hits > 0


@pytest.mark.parametrize("fake", [{"latency_us": 500}, {"bandwidth_mbs": 200}, {"host_buffer": 1}, {"threads": 2}], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_other_devices(learning, fake, rule):
    """Slow ones too: a copy is under way while several tokens are computed, or a token waits for it."""
    model = generated("Q4_K")
    profile = learning.hot.profile(model, STEPS)
    ours = learning.run(model, STEPS, profile, rule, fake=fake)
    assert_same_answer(learning.hot.probe.stock(model, STEPS), ours)
    assert ours.complaints == []
    assert ours.hits > 0


def test_the_perplexity_on_rpc_is_stocks(tmp_path, rpc_endpoint):
    """Of the shipped model, with an RPC server's device and batches of 8 tokens."""
    small, half_mib = ["-b", 8, "-ub", 8], 8
    text = "".join(read(path)[:3000] for path in TEXTS)
    profile, hits = tmp_path / "experts.json", tmp_path / "hits.json"
    chunks = ["--chunks", 12, *small]
    stock = score(STOCK, text, tmp_path, "stock", *chunks)
    score(LAUNCHED, text, tmp_path, "recording", *chunks, "--moe-layer-perf-out", profile)
    cache = ["--rpc", rpc_endpoint, "--moe-hot-cache", profile, "--moe-hot-cache-device", "RPC0"]
    half = ["--moe-hot-cache-max-mib", half_mib, "--moe-layer-perf-out", hits]
    ours = score(LAUNCHED, text, tmp_path, "ours", *chunks, *cache, *half)
    both = [(float(a), float(b)) for a, b in zip(printed_perplexity(stock), printed_perplexity(ours))]
    assert len(both) >= 6
    assert all(abs(b / a - 1) < LARGEST_DIFFERENCE for a, b in both)
    assert Profile.read(hits, cached=True).hits > 0
