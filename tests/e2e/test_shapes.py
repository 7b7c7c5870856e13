"""Every shape of expert FFN: stock's answer bit for bit, and one split per layer that holds just the expert FFN."""

import pytest

from models import EXPERTS, generated
from probe import DEVICE, assert_meaningful, assert_same_answer, decode, differ, greedy
from results import record_result
from shapes import SHAPES
from splits import backends_of, of_backend

BATCHES = [decode(1), decode(60, "last"), decode(2), decode(5), decode(31), decode(32), decode(5, "last"), decode(1)]
DECODER_BATCHES = [*BATCHES, greedy(6)]  # an encoder predicts no token
WAYS = {"cpu": "--cpu-moe", "rpc": "--cpu-moe, dense on RPC"}

ALL_F16 = [(name, "F16") for name in SHAPES]
QUANTIZED = [(name, "Q4_K") for name in SHAPES]
MXFP4 = [("gpt-oss", "MXFP4"), ("gpt-oss+lora", "MXFP4")]


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


def find_model(name: str, type_name: str):
    return generated("F16" if type_name == "F16" else f"{EXPERTS}{type_name}", SHAPES[name].architecture)


def assert_whole_blocks(profile, shape) -> None:
    assert profile.blocks == dict.fromkeys(shape.layers, shape.block)
    if shape.n_expert_used:
        assert profile.n_expert_used_by_layer == dict(zip(shape.layers, shape.n_expert_used, strict=True))


@pytest.mark.parametrize(
    ("name", "type_name"), [*ALL_F16, *MXFP4, *(pytest.param(*pair, marks=pytest.mark.full) for pair in QUANTIZED)]
)
def test_the_answer_is_stocks(probe, name, type_name, placement, request):
    shape, model = SHAPES[name], find_model(name, type_name)
    steps = BATCHES if shape.is_encoder else DECODER_BATCHES
    options = shape.options | placement
    stock = probe.stock(model, steps, **options)
    ours = probe.recording(model, steps, **options)
    assert_meaningful(stock)
    assert_same_answer(stock, ours)
    assert all(calls > 0 for calls in ours.profile.calls.values())
    assert_whole_blocks(ours.profile, shape)
    record_result(name, type_name, WAYS["rpc" if placement else "cpu"], "equal")


def test_one_split_per_layer(probe, shape, placement):
    """Its operations are those of the expert FFN and no others: of a batch of 32, which is stock's, there is none."""
    model = generated("F16", shape.architecture)
    small, large = probe.graphs(model, [decode(5), decode(32)], **shape.options, **placement)[-2:]
    assert [split.ops for split in of_backend(small, DEVICE)] == shape.splits
    assert of_backend(large, DEVICE) == []


def test_weighting_and_sum_stay_with_the_main_backend(probe, shape, placement):
    model = generated("F16", shape.architecture)
    *_, graph = probe.graphs(model, [decode(5)], **shape.options, **placement)
    assert of_backend(graph, DEVICE)
    main_backend = "RPC" if placement else "CPU"
    for name in ("ffn_moe_weighted", "ffn_moe_out"):
        backends = backends_of(graph, name)
        assert backends, f"no node {name}"
        assert all(backend.startswith(main_backend) for backend in backends), f"{name}: {backends}"


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.lora])
def test_an_adapter_changes_the_answer(probe, name):
    shape = SHAPES[name]
    model = generated("F16", shape.architecture)
    without = {key: value for key, value in shape.options.items() if key != "lora"}
    assert differ(probe.stock(model, BATCHES, **shape.options), probe.stock(model, BATCHES, **without))
