"""With experts resident on a device the answer is stock's (`--no-repack`), bit for bit: every shape of expert FFN, any
number of resident experts, any mixture of batches. FakeDevice computes as the CPU does, so that rows can be compared."""

import pytest

from experts_json import Profile
from hot import CALLS_BEFORE_FILL, HotResult, experts_per_layer
from models import EXPERTS, generated
from probe import assert_meaningful, assert_same_answer, decode, differ, greedy, threads
from shapes import SHAPES

# The fill comes before the fourth batch. Batches of 33 and 40 are stock's, but for the one row that "last" leaves.
DECODES = [decode(2), decode(7), decode(33, "last"), decode(31), decode(40), decode(1)]
STEPS = [decode(1), greedy(CALLS_BEFORE_FILL), *DECODES, greedy(6)]
ENCODER_STEPS = [*[decode(1, seed=seed) for seed in range(CALLS_BEFORE_FILL)], *DECODES]  # predicts no token

# Of the experts of a layer.
SHARES = {
    "none": lambda n: 0,
    "one": lambda n: 1,
    "25 %": lambda n: n // 4,
    "50 %": lambda n: n // 2,
    "all but one": lambda n: n - 1,
    "all": lambda n: n,
}
ALWAYS = ("one", "50 %", "all")

SEQUENCES = [
    decode({0: 1, 1: 1, 2: 1, 3: 1}, "last"),
    greedy(CALLS_BEFORE_FILL, sequences=(0, 1, 2, 3)),
    decode({0: 5, 1: 1, 2: 17, 3: 3}, "last"),
    greedy(6, sequences=(2, 0)),
    decode({1: 9, 3: 40}),
    greedy(8, sequences=(0, 1, 2, 3)),
]
AT_ONCE = [
    decode(20, context=0),
    decode(9, context=1),
    greedy(2, context=0),
    threads(
        [greedy(16, context=0), decode(33, context=0), decode(7, context=0), greedy(8, context=0)],
        [decode(12, context=1), greedy(24, context=1)],
    ),
    greedy(4, context=0),
    greedy(4, context=1),
]


def cases(names) -> list:
    """Every name with every share; those that are not in ALWAYS with --full only."""
    marks = {share: () if share in ALWAYS else pytest.mark.full for share in SHARES}
    return [pytest.param(name, share, marks=marks[share]) for name in names for share in SHARES]


def assert_hot(result, slots: int) -> None:
    """The cache is as asked for, has served whatever it can, and leaves nothing behind."""
    assert result.complaints == []
    assert result.start.slots == slots
    assert (result.hits > 0) == (slots > 0)
    if slots == result.start.n_expert:
        assert result.start.expected == 100
    assert (result.stats["mul_mat_id_graphs"] > 0) == (slots > 0)
    assert result.stats["allocated_bytes"] == 0


def assert_same_with(hot, model, steps, share: str, **options) -> HotResult:
    stock = hot.probe.stock(model, steps, **options)
    profile = hot.profile(model, steps, **options)
    slots = SHARES[share](experts_per_layer(profile))
    ours = hot.run(model, steps, profile, slots=slots, **options)
    assert_meaningful(stock)
    assert_same_answer(stock, ours)
    assert_hot(ours, slots)
    return ours


@pytest.mark.parametrize(("name", "share"), cases(SHAPES))
def test_every_shape(hot, name, share):
    shape = SHAPES[name]
    steps = ENCODER_STEPS if shape.is_encoder else STEPS
    ours = assert_same_with(hot, generated("F16", shape.architecture), steps, share, **shape.options)
    if share == "all":
        profile = Profile.read(hot.profile(generated("F16", shape.architecture), steps, **shape.options))
        assert ours.end.misses <= CALLS_BEFORE_FILL * len(shape.layers) * profile.n_expert_used


@pytest.mark.full
@pytest.mark.parametrize(("name", "type_name"), [*((name, "Q4_K") for name in SHAPES), ("gpt-oss", "MXFP4")])
def test_every_shape_quantized(hot, name, type_name):
    shape = SHAPES[name]
    steps = ENCODER_STEPS if shape.is_encoder else STEPS
    assert_same_with(hot, generated(f"{EXPERTS}{type_name}", shape.architecture), steps, "50 %", **shape.options)


def test_the_comparison_sees_what_the_device_computes(hot):
    """A device that computes nothing gives another answer: were that not seen, no test here would mean anything."""
    model = generated("Q4_K")
    profile = hot.profile(model, STEPS)
    ours = hot.run(model, STEPS, profile, slots=1, fake={"null_compute": 1})
    assert ours.hits > 0
    assert differ(hot.probe.stock(model, STEPS), ours)


@pytest.mark.parametrize("share", ["one", "50 %", "all"])
def test_every_type(hot, model, share):
    assert_same_with(hot, model, STEPS, share)


@pytest.mark.parametrize("share", ["50 %", pytest.param("all", marks=pytest.mark.full)])
def test_four_sequences_in_a_batch(hot, model_of_two, share):
    assert_same_with(hot, model_of_two, SEQUENCES, share, n_seq=4)


@pytest.mark.parametrize("share", ["50 %", pytest.param("all", marks=pytest.mark.full)])
def test_two_contexts_in_two_threads_share_one_cache(hot, model_of_two, share):
    assert_same_with(hot, model_of_two, AT_ONCE, share, contexts=2, n_threads=1)


def test_a_profile_recorded_with_a_cache_tells_hits_from_misses(hot, model_of_two, tmp_path):
    """And counts the same requests as one recorded without."""
    profile = hot.profile(model_of_two, STEPS)
    out_file = tmp_path / "experts.json"
    slots = experts_per_layer(profile) // 2
    ours = hot.run(
        model_of_two, STEPS, profile, slots=slots, environment={"LLAMA_ARG_MOE_LAYER_PERF_OUT": out_file}
    )
    without, cached = Profile.read(profile), Profile.read(out_file, cached=True)
    assert cached.hits == ours.hits > 0
    assert cached.n_requests == without.n_requests
    assert cached.by_batch_size == without.by_batch_size
    hot_experts = [len(layer["hot_experts"]) for layer in cached.raw["layers"]]
    assert all(0 < n <= slots for n in hot_experts)


@pytest.mark.parametrize(
    "options",
    [
        {"n_ubatch": 16},
        {"n_threads": 3},
        {"load_mode": "none"},
        {"n_seq": 4, "kv_unified": False},
    ],
    ids=str,
)
def test_other_ways_to_load_and_to_batch(hot, options):
    steps = SEQUENCES if "n_seq" in options else [*STEPS, decode(300), greedy(4)]
    assert_same_with(hot, generated("Q4_K"), steps, "50 %", **options)


def test_a_split_model(hot):
    """Each layer's experts may lie in several buffers."""
    assert_same_with(hot, generated("split"), STEPS, "50 %")


@pytest.mark.parametrize(
    "fake", [{"host_buffer": 1}, {"latency_us": 2000}, {"threads": 3}, {"host_buffer": 1, "bandwidth_mbs": 50}], ids=str
)
def test_other_devices(hot, fake):
    """With page-locked host memory, and slow ones."""
    model, slots = generated("Q4_K"), 8
    ours = hot.run(model, STEPS, hot.profile(model, STEPS), slots=slots, fake=fake)
    assert_same_answer(hot.probe.stock(model, STEPS), ours)
    assert_hot(ours, slots)


@pytest.mark.parametrize("variable", ["MOE_HOT_NO_HOST", "LLAMA_ARG_NO_HOST"])
def test_without_page_locked_memory(hot, variable):
    model, slots = generated("Q4_K"), 8
    profile = hot.profile(model, STEPS)
    ours = hot.run(model, STEPS, profile, slots=slots, fake={"host_buffer": 1}, environment={variable: 1})
    assert_same_answer(hot.probe.stock(model, STEPS), ours)
    assert_hot(ours, slots)


@pytest.mark.parametrize("threshold", [2, 8, 64, 400])
def test_another_threshold_for_stocks_batches(hot, threshold):
    """Batches from there on are stock's; a raised one makes ours larger, up to a limit for those that run hot."""
    model, slots = generated("Q4_K"), 8
    steps = [*STEPS, decode(50), decode(63), decode(64), decode(65), decode(300), greedy(3)]
    ours = hot.run(
        model, steps, hot.profile(model, STEPS), slots=slots, environment={"GGML_OP_OFFLOAD_MIN_BATCH": threshold}
    )
    assert_same_answer(hot.probe.stock(model, steps), ours)
    assert_hot(ours, slots)


def test_with_an_eval_callback(hot, model_of_two):
    """One that watches the router's choice, which stays outside of the expert FFN."""
    profile = hot.profile(model_of_two, STEPS)
    stock = hot.probe.stock(model_of_two, STEPS, count_experts=True)
    ours = hot.run(model_of_two, STEPS, profile, slots=8, count_experts=True)
    assert_same_answer(stock, ours)
    assert_hot(ours, 8)
    assert ours.expert_counts == stock.expert_counts
