"""With dense layers on the device that has the cache, as users have them: the answer is that of stock with dense layers there, bit
for bit, whether splits lie on the device or in host memory. FakeDevice computes as the CPU does."""

import json

import pytest

import paths
from fake import FAKE_DEVICE, ON_DEVICE, fake_environment
from hot import HotResult, experts_per_layer
from models import generated
from probe import assert_meaningful, assert_same_answer, decode, greedy
from processes import run
from shapes import SHAPES
from test_hot_shapes import AT_ONCE, ENCODER_STEPS, SEQUENCES, SHARES, STEPS
from test_unkind import N_LAYERS

SPLITS = {
    "splits on the device": {},
    "their rows through host memory": {"MOE_HOT_TEST_HOST_ROWS": 1},
    "splits in host memory": {"MOE_HOT_TEST_HOST_SPLITS": 1},
}
OTHER_KINDS = {
    "page-locked": {"host_buffer": 1},
    "blocking": {"host_buffer": 1, "pageable_blocks": 1},
    "late": {"latency_us": 200},
    "without asynchronous copies": {"no_async": 1},
}
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
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_devices_of_other_kinds(hot, model_of_two, kind, splits):
    assert_same_with(hot, model_of_two, STEPS, "50 %", splits, fake=OTHER_KINDS[kind])


@EACH_WAY
def test_graphs_that_are_never_used_again(hot, model_of_two, splits):
    assert_same_with(hot, model_of_two, STEPS, "50 %", splits, more={"LLAMA_GRAPH_REUSE_DISABLE": 1})


@EACH_WAY
def test_residents_that_are_swapped(hot, model_of_two, splits):
    learning = {"MOE_HOT_TEST_FREE_COPIES": 1, "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": ""}
    assert_same_with(hot, model_of_two, [*STEPS, greedy(60)], "50 %", splits, more=learning)


@EACH_WAY
def test_an_eval_callback_sees_what_it_sees_in_stock(hot, model_of_two, splits):
    """llama.cpp hands over a split in pieces then, and a program may read any result."""
    ours = assert_same_with(hot, model_of_two, STEPS, "50 %", splits, count_experts=True)
    assert ours.expert_counts == stock(hot, model_of_two, STEPS, **ON_DEVICE, count_experts=True).expert_counts


@EACH_WAY
def test_imatrix(hot, tmp_path, splits):
    """It reads rows and ids that go into every weight, and has each projection computed by itself. The file is stock's, byte for
    byte."""
    model, text = generated("Q4_K"), tmp_path / "text"
    text.write_text("What a layer asks for differs by kind of text: prose, programs, pages of a manual. " * 6)
    command = [paths.STOCK_BIN / "llama-imatrix", "-m", model, "-f", text, "--no-repack", "--cpu-moe", "-t", 1, "-ngl", 99, "--device", FAKE_DEVICE]
    command += ["-c", 64, "-b", 16, "-ub", 16, "--chunks", 4]
    profile = hot.profile(model, STEPS)
    cache = {"LLAMA_ARG_MOE_HOT_CACHE": profile, "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0}
    runs = {"stock": fake_environment(), "ours": fake_environment(plugin=paths.PLUGIN, **cache, **SPLITS[splits])}
    for name, environment in runs.items():
        run([*command, "-o", tmp_path / name], tmp_path / f"{name}.log", environment)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "stock").read_bytes()


def waits_per_layer(result_of, stats) -> float:
    """Of calls that keep their caller waiting, for a token's layer."""
    counts = []
    for n in (40, 140):
        result_of([decode(1), greedy(n)])
        numbers = json.loads(stats.read_text())
        counts.append(numbers["waits"] + numbers["blocking_copies"])
    return (counts[1] - counts[0]) / 100 / N_LAYERS


def test_half_of_stocks_waits_are_left(hot, tmp_path):
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
        ours = {"plugin": paths.PLUGIN, **cache, **more} if what in SPLITS else {}
        environment = fake_environment(host_buffer=1, stats=stats, **ours)
        found[what] = waits_per_layer(lambda steps: hot.probe.faking(model, steps, environment, cpu_moe=cpu_moe, **options), stats)
    print(f"waits per layer: {found}")
    at_least = found["stock, all on the device"]
    assert found["splits on the device"] < found["their rows through host memory"] < found["splits in host memory"]
    # Beyond what llama.cpp itself waits for, whoever has the experts.
    assert found["splits on the device"] - at_least <= (found["stock, --cpu-moe"] - at_least) / 2
