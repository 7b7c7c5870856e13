"""With dense layers on the device that has the cache, as users have them: the answer is that of stock with dense layers there, bit
for bit, whether splits lie on the device or in host memory. FakeDevice computes as the CPU does."""

import json

import pytest

from fake import FAKE_DEVICE, ON_DEVICE, fake_environment
from hot import HotResult, experts_per_layer
from models import generated
from paths import PLUGIN
from probe import assert_meaningful, assert_same_answer, decode, greedy
from shapes import SHAPES
from test_hot_shapes import AT_ONCE, ENCODER_STEPS, SEQUENCES, SHARES, STEPS

SPLITS = {"splits on the device": {}, "splits in host memory": {"MOE_HOT_TEST_HOST_SPLITS": 1}}
EACH_WAY = pytest.mark.parametrize("splits", SPLITS)


def stock(hot, model, steps, **options):
    result = hot.probe.faking(model, steps, fake_environment(), **options)
    assert FAKE_DEVICE in result.devices and "offloaded" in result.log
    return result


def assert_same_with(hot, model, steps, share: str, splits: str, fake: dict | None = None, more: dict | None = None, **options) -> HotResult:
    options = {**ON_DEVICE, **options}
    expected = stock(hot, model, steps, **options)
    profile = hot.profile(model, steps, **{name: value for name, value in options.items() if name not in ON_DEVICE})
    slots = SHARES[share](experts_per_layer(profile))
    ours = hot.run(model, steps, profile, slots, fake=fake, environment=SPLITS[splits] | (more or {}), **options)
    assert "offloaded" in ours.log
    assert_meaningful(expected)
    assert_same_answer(expected, ours)
    assert ours.complaints == []
    assert (ours.hits > 0) == (slots > 0)
    assert ours.stats["allocated_bytes"] == 0
    return ours


@EACH_WAY
@pytest.mark.parametrize("share", ["none", "one", "50 %", "all"])
def test_batches_of_all_sizes(hot, model_of_two, share, splits):
    assert_same_with(hot, model_of_two, STEPS, share, splits)


@EACH_WAY
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape(hot, name, splits):
    shape = SHAPES[name]
    steps = ENCODER_STEPS if shape.is_encoder else STEPS
    assert_same_with(hot, generated("F16", shape.architecture), steps, "50 %", splits, **shape.options)


@EACH_WAY
def test_four_sequences_in_a_batch(hot, model_of_two, splits):
    assert_same_with(hot, model_of_two, SEQUENCES, "50 %", splits, n_seq=4)


@EACH_WAY
def test_two_contexts_in_two_threads(hot, model_of_two, splits):
    assert_same_with(hot, model_of_two, AT_ONCE, "50 %", splits, contexts=2)


@EACH_WAY
@pytest.mark.parametrize("n_gpu_layers", [0, 1, 2])
def test_some_layers_on_the_device(hot, model_of_two, n_gpu_layers, splits):
    assert_same_with(hot, model_of_two, STEPS, "50 %", splits, n_gpu_layers=n_gpu_layers)


@EACH_WAY
@pytest.mark.parametrize("fake", [{"host_buffer": 1}, {"host_buffer": 1, "pageable_blocks": 1}, {"latency_us": 200}], ids=["page-locked", "blocking", "late"])
def test_devices_of_other_kinds(hot, model_of_two, fake, splits):
    assert_same_with(hot, model_of_two, STEPS, "50 %", splits, fake=fake)


@EACH_WAY
def test_graphs_that_are_never_used_again(hot, model_of_two, splits):
    assert_same_with(hot, model_of_two, STEPS, "50 %", splits, more={"LLAMA_GRAPH_REUSE_DISABLE": 1})


@EACH_WAY
def test_residents_that_are_swapped(hot, model_of_two, splits):
    learning = {"MOE_HOT_TEST_FREE_COPIES": 1, "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": ""}
    assert_same_with(hot, model_of_two, [*STEPS, greedy(60)], "50 %", splits, more=learning)


def waits_per_layer(result_of, stats) -> float:
    """Of calls that keep their caller waiting, for a token's layer."""
    counts = []
    for n in (40, 140):
        result_of([decode(1), greedy(n)])
        numbers = json.loads(stats.read_text())
        counts.append(numbers["waits"] + numbers["blocking_copies"])
    return (counts[1] - counts[0]) / 100


def test_waits(hot, tmp_path):
    model, options = generated("Q4_K"), {**ON_DEVICE, "n_ctx": 1024}
    profile = hot.profile(model, STEPS)
    found = {}
    for what, more, cpu_moe in (
        ("stock, all on the device", {}, False),
        ("stock, --cpu-moe", {}, True),
        *((splits, more, True) for splits, more in SPLITS.items()),
    ):
        stats = tmp_path / "stats"
        cache = {"LLAMA_ARG_MOE_HOT_CACHE": profile, "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0, "MOE_HOT_TEST_SLOTS": experts_per_layer(profile)}
        ours = {"plugin": PLUGIN, **cache, **more} if what in SPLITS else {}
        environment = fake_environment(host_buffer=1, stats=stats, **ours)
        found[what] = waits_per_layer(lambda steps: hot.probe.faking(model, steps, environment, cpu_moe=cpu_moe, **options), stats)
    print(found)
    assert found["splits on the device"] < found["splits in host memory"] < found["stock, --cpu-moe"]
