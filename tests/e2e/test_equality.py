"""With the plugin recording and nothing resident, token ids and logits are stock's (`--no-repack`), bit for bit."""

import pytest

from models import generated
from probe import assert_equal_and_computed, assert_same_answer, decode, greedy, threads

# 300 last: its last layer sees one row. 5 none: its last layer sees no row at all.
CHANGING_BATCHES = [
    decode(1),
    decode(300, "last"),
    decode(2),
    decode(33),
    decode(5, "none"),
    decode(32, "last"),
    decode(8),
    decode(31),
    decode(32),
    decode(5),
    decode(300),
    greedy(8),
    decode(31, "last"),
    greedy(4),
]

FOUR_SEQUENCES = [
    decode({0: 5, 1: 1, 2: 17, 3: 3}, "last"),
    greedy(8, sequences=(0, 1, 2, 3)),
    decode({1: 9, 3: 40}),
    greedy(4, sequences=(3, 0)),
    greedy(4, sequences=(2, 1, 0, 3)),
]

TWO_CONTEXTS = [
    decode(20, context=0),
    decode(35, context=1),
    greedy(3, context=0),
    greedy(3, context=1),
    decode(8, context=0, seed=11),
    greedy(3, context=1),
    threads(
        [greedy(24, context=0), decode(33, context=0), greedy(8, context=0)],
        [decode(12, context=1), greedy(32, context=1)],
    ),
    greedy(4, context=0),
    greedy(4, context=1),
]


def test_the_comparison_sees_another_rounding(probe):
    """Repacked weights round otherwise: were that not seen, no test here would mean anything."""
    model = generated("Q4_0")
    repacked = probe.stock(model, CHANGING_BATCHES, repack=True)
    with pytest.raises(AssertionError):
        assert_same_answer(probe.stock(model, CHANGING_BATCHES), repacked)


def test_batches_that_change_midway(probe, model, placement):
    assert_equal_and_computed(probe, model, CHANGING_BATCHES, **placement)


def test_dense_layers_really_run_on_the_rpc_device(probe, rpc_endpoint):
    stock = probe.stock(generated("Q4_K"), CHANGING_BATCHES, rpc=rpc_endpoint, n_gpu_layers=99)
    assert any(name.startswith("RPC") for name in stock.devices)
    assert "offloaded 4/4 layers to GPU" in stock.log


@pytest.mark.parametrize("kv_unified", [True, False])
def test_four_sequences_in_one_batch(probe, model, kv_unified):
    assert_equal_and_computed(probe, model, FOUR_SEQUENCES, n_seq=4, kv_unified=kv_unified)


def test_four_sequences_with_dense_layers_on_rpc(probe, model_of_two, rpc_endpoint):
    assert_equal_and_computed(probe, model_of_two, FOUR_SEQUENCES, n_seq=4, rpc=rpc_endpoint, n_gpu_layers=99)


def test_two_contexts_at_once(probe, model):
    assert_equal_and_computed(probe, model, TWO_CONTEXTS, contexts=2, n_threads=1)


@pytest.mark.parametrize("n_threads", [1, 3])
def test_any_number_of_threads(probe, model_of_two, n_threads):
    assert_equal_and_computed(probe, model_of_two, CHANGING_BATCHES, n_threads=n_threads)


def test_prompt_in_small_ubatches(probe, model_of_two):
    assert_equal_and_computed(probe, model_of_two, CHANGING_BATCHES, n_ubatch=16)


@pytest.mark.parametrize("load_mode", ["mmap", "none"])
@pytest.mark.parametrize("variant", ["F16", "Q4_K", "split"])
def test_every_way_to_load(probe, variant, load_mode):
    assert_equal_and_computed(probe, generated(variant), CHANGING_BATCHES, load_mode=load_mode)


def test_a_split_model_answers_as_the_whole_one(probe):
    whole = probe.stock(generated("F16"), CHANGING_BATCHES)
    split = probe.recording(generated("split"), CHANGING_BATCHES)
    assert split.profile.layer_calls > 0
    assert_same_answer(whole, split)


def test_with_an_eval_callback(probe, model_of_two):
    """With one, llama.cpp hands over a split in pieces; the answer stays stock's."""
    assert_equal_and_computed(probe, model_of_two, CHANGING_BATCHES, count_experts=True)
