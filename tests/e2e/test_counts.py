"""The profile's counts are those that an eval callback in stock llama.cpp takes from its own routing tensors."""

import pytest

from experts_json import BATCH_CLASSES
from probe import assert_same_answer, decode, greedy

EVERY_SMALL_BATCH = [decode(n) for n in range(1, 32)]
# of the batch of 32 with one output, the last layer sees one row: a batch of 1
WITH_LARGE_BATCHES = [decode(32), decode(3), decode(33), decode(32, "last"), greedy(5), decode(40), decode(7, "none")]
LARGE_BATCHES_ONLY = [decode(32), decode(64), decode(300)]


def counted_in_stock(stock) -> dict[int, dict]:
    """Stock's counts in the shape of Profile.by_batch_size; batches of 32 and more are not the plugin's."""
    return {
        int(layer): {
            name: {"calls": counts["calls"], "experts": dict(map(tuple, counts["experts"]))}
            for name, counts in classes.items()
            if name in BATCH_CLASSES
        }
        for layer, classes in stock.expert_counts.items()
    }


def assert_same_counts(probe, model, steps, **options):
    stock = probe.stock(model, steps, count_experts=True, **options)
    ours = probe.recording(model, steps, **options)
    assert_same_answer(stock, ours)
    counts = counted_in_stock(stock)
    assert ours.profile.by_batch_size == counts
    assert ours.profile.layer_calls == sum(c["calls"] for layer in counts.values() for c in layer.values()) > 0
    return ours.profile


def test_every_batch_size_below_32(probe, model_of_two, placement):
    profile = assert_same_counts(probe, model_of_two, EVERY_SMALL_BATCH, **placement)
    n_tokens = sum(range(1, 32))
    assert profile.n_rows == dict.fromkeys(profile.layers, n_tokens)


def test_batches_of_32_and_more_are_not_seen(probe, model_of_two):
    assert_same_counts(probe, model_of_two, WITH_LARGE_BATCHES)


def test_large_batches_alone_leave_no_profile(probe, model_of_two):
    ours = probe.recording(model_of_two, LARGE_BATCHES_ONLY)
    assert_same_answer(probe.stock(model_of_two, LARGE_BATCHES_ONLY), ours)
    assert not ours.out_file.exists()


def test_a_prompt_in_small_ubatches_is_seen(probe, model_of_two):
    assert_same_counts(probe, model_of_two, [decode(100), greedy(3)], n_ubatch=16)


@pytest.mark.parametrize("kv_unified", [True, False])
def test_four_sequences(probe, model_of_two, kv_unified):
    steps = [decode({0: 5, 1: 1, 2: 12, 3: 3}), greedy(6, sequences=(0, 1, 2, 3)), decode({1: 9, 3: 40}, "last")]
    assert_same_counts(probe, model_of_two, steps, n_seq=4, kv_unified=kv_unified)


def test_two_contexts_count_into_one_profile(probe, model_of_two):
    steps = [decode(9, context=0), decode(4, context=1), greedy(5, context=0), greedy(5, context=1)]
    assert_same_counts(probe, model_of_two, steps, contexts=2)
