"""Programs that watch the graph: llama.cpp then hands over a layer in pieces, and the plugin computes and counts it
once, not once per piece."""

import pytest

import paths
from experts_json import Profile
from models import generated
from probe import assert_same_answer, decode, greedy
from processes import run, stock_environment
from results import record_result
from test_counts import counted_in_stock
from ways import N_LAYERS, RPC_NAME, SHAPE, TYPE

N_CONTEXT, N_CHUNKS, N_BATCH = 64, 4, 16
TEXT = "What a layer asks for differs by kind of text: prose, programs, pages of a manual. " * 6
SMALL_AND_LARGE_BATCHES = [decode(1), decode(7), decode(40), decode(31, "last"), greedy(6), decode(5, "none")]


@pytest.mark.parametrize("dense", ["CPU", "RPC"])
def test_imatrix(tmp_path, request, dense):
    """The file is stock's, byte for byte: sums of squares of what went into every weight, and counts per expert."""
    device = ["--rpc", request.getfixturevalue("rpc_endpoint"), "-ngl", 99] if dense == "RPC" else []
    text_file, profile_file = tmp_path / "text", tmp_path / "experts.json"
    text_file.write_text(TEXT)
    arguments = ["-m", generated(TYPE), "-f", text_file, "--no-repack", "--cpu-moe", "-t", 2, *device]
    arguments += ["-c", N_CONTEXT, "-b", N_BATCH, "-ub", N_BATCH, "--chunks", N_CHUNKS]

    def imatrix(command: list, name: str) -> bytes:
        output = tmp_path / f"{name}.gguf"
        run([*command, *arguments, "-o", output], tmp_path / f"{name}.log", stock_environment())
        return output.read_bytes()

    stock = imatrix([paths.STOCK_BIN / "llama-imatrix"], "stock")
    ours = imatrix([paths.LAUNCHER, "llama-imatrix", "--moe-layer-perf-out", profile_file], "ours")
    assert b"blk.0.ffn_down_exps.weight.in_sum2" in stock
    assert ours == stock
    profile = Profile.read(profile_file)
    assert profile.n_rows == dict.fromkeys(range(N_LAYERS), N_CHUNKS * N_CONTEXT)
    calls = {layer["layer"]: layer["calls"] for layer in profile.raw["layers"]}
    assert calls == dict.fromkeys(range(N_LAYERS), N_CHUNKS * N_CONTEXT // N_BATCH)
    record_result(SHAPE, TYPE, "llama-imatrix" if dense == "CPU" else f"llama-imatrix, {RPC_NAME}", "equal")


def test_an_eval_callback_sees_what_it_sees_in_stock(probe, placement):
    model = generated(TYPE)
    stock = probe.stock(model, SMALL_AND_LARGE_BATCHES, count_experts=True, **placement)
    ours = probe.recording(model, SMALL_AND_LARGE_BATCHES, count_experts=True, **placement)
    assert_same_answer(stock, ours)
    assert ours.expert_counts == stock.expert_counts
    assert ours.profile.by_batch_size == counted_in_stock(stock)
    record_result(SHAPE, TYPE, f"eval callback, {RPC_NAME}" if placement else "eval callback", "equal")
