"""`--moe-trace-out`: the routing of every call, as it was, and what `moe-hot replay` makes of it."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

import paths
from conftest import shipped_model
from experts_json import Profile
from launcher import assert_refused, launch, write_fake
from models import generated
from probe import DEVICE, assert_same_answer, decode, greedy
from processes import HANG_S, run, stock_environment, wait_for
from server import COMMON_ARGUMENTS, start
from traces import MAGIC, Trace

STEPS = [decode(3), decode(31), greedy(20), decode(2), decode(40), decode({0: 4, 1: 2}), greedy(4, sequences=(0, 1))]
GOLDEN = paths.REPOSITORY / "tests/traces"
GOLDEN_SLOTS = "8,16"
TOLERANCE = 1e-6


def traced(probe, model: Path, folder: Path, **variables) -> tuple:
    """A run of moe-probe that records both the trace and the profile."""
    trace, profile = folder / "trace", folder / "experts.json"
    environment = stock_environment(
        GGML_BACKEND_PATH=str(paths.PLUGIN),
        LLAMA_ARG_MOE_TRACE_OUT=str(trace),
        LLAMA_ARG_MOE_LAYER_PERF_OUT=str(profile),
        **variables,
    )
    result = probe.faking(model, STEPS, environment, n_seq=2)
    assert DEVICE in result.devices
    return result, Trace.read(trace), Profile.read(profile)


def replay(*arguments) -> list[dict]:
    command = [str(word) for word in (paths.LAUNCHER, "replay", "--json", "-", *arguments)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=HANG_S).stdout)


def test_the_trace_has_the_counts_of_the_profile(probe, model, tmp_path):
    result, trace, profile = traced(probe, model, tmp_path)
    assert_same_answer(probe.stock(model, STEPS, n_seq=2), result)
    assert trace.counts() == profile.by_batch_size
    assert trace.fingerprint == profile.raw["model"]["fingerprint"]
    used = {layer: n_used for layer, (_, n_used, _) in trace.layers.items()}
    assert used == profile.n_expert_used_by_layer
    assert {n_expert for n_expert, *_ in trace.layers.values()} == {profile.raw["n_expert"]}
    assert all(n_bytes > 0 for *_, n_bytes in trace.layers.values())


@pytest.mark.parametrize("name", ["deepseek2", "llama4-top1", "grovemoe", "nemotron_h_moe-by-layer"])
def test_layers_that_are_not_all_alike(probe, tmp_path, name):
    _, trace, profile = traced(probe, generated("F16", name), tmp_path)
    assert trace.counts() == profile.by_batch_size
    assert {layer: n_used for layer, (_, n_used, _) in trace.layers.items()} == profile.n_expert_used_by_layer


def test_a_trace_alone_is_a_reason_to_take_experts(probe, tmp_path):
    model, trace = generated("Q4_K"), tmp_path / "trace"
    environment = stock_environment(GGML_BACKEND_PATH=str(paths.PLUGIN), LLAMA_ARG_MOE_TRACE_OUT=str(trace))
    result = probe.faking(model, STEPS, environment, n_seq=2)
    assert_same_answer(probe.stock(model, STEPS, n_seq=2), result)
    assert Trace.read(trace).batches


def server(folder: Path, trace: Path, *arguments):
    command = [paths.LAUNCHER, "llama-server", "-m", generated("Q4_K"), *COMMON_ARGUMENTS, "--moe-trace-out", trace]
    return start([*command, *arguments], folder, "server", stock_environment())


def test_through_the_launcher_with_the_counts_of_its_profile(tmp_path):
    trace, profile = tmp_path / "trace", tmp_path / "experts.json"
    with server(tmp_path, trace, "--moe-layer-perf-out", profile) as running:
        running.complete("Once upon a time", 20)
        running.complete_together(["The king", "def main"], 12)
        running.stop()
    assert Trace.read(trace).counts() == Profile.read(profile).by_batch_size
    (row,) = replay("--slots", "8", "--policy", "lru", trace)
    assert 0 < row["hit"] < 1


def test_a_killed_process_leaves_a_trace_that_can_be_read(tmp_path):
    trace = tmp_path / "trace"

    def has_tokens() -> bool:
        running.complete([1, 2, 3], 8)
        return trace.exists() and trace.stat().st_size > 1000

    with server(tmp_path, trace) as running:
        wait_for("the trace has something", has_tokens)
        running.child.send_signal(signal.SIGKILL)
        running.child.wait(timeout=HANG_S)
    (row,) = replay("--slots", "8", "--policy", "lru", trace)
    assert 0 < row["hit"] < 1


def test_an_earlier_trace_is_replaced_and_nothing_else_is(probe, tmp_path):
    program, file = write_fake(tmp_path / "llama-fake"), tmp_path / "trace"
    for taken in (b"GGUF....", b'{"schema": "llama.cpp.moe_layer_perf.v1"}', MAGIC[:5]):
        file.write_bytes(taken)
        assert_refused(launch(program, "--moe-trace-out", file), str(file), "expected a new file or an earlier trace")
        assert_refused(launch(program, LLAMA_ARG_MOE_TRACE_OUT=str(file)), str(file), "expected a new file or an earlier")
        assert file.read_bytes() == taken
    assert_refused(launch(program, "--moe-trace-out", tmp_path), "expected a new file or an earlier trace")
    assert_refused(launch(program, "--moe-trace-out", tmp_path / "nowhere/trace"), "existing folder")
    for free in (b"", MAGIC, MAGIC + b"junk"):
        file.write_bytes(free)
        started = launch(program, "--moe-trace-out", file).started
        assert started["environment"]["LLAMA_ARG_MOE_TRACE_OUT"] == str(file)
        assert file.read_bytes() == free
    file.write_bytes(MAGIC + b"junk")
    _, trace, profile = traced(probe, generated("Q4_K"), tmp_path)
    assert trace.counts() == profile.by_batch_size


def test_the_plugin_alone_replaces_no_file_that_is_no_trace(probe, tmp_path):
    model, file = generated("Q4_K"), tmp_path / "trace"
    file.write_bytes(b"GGUF....")
    environment = stock_environment(GGML_BACKEND_PATH=str(paths.PLUGIN), LLAMA_ARG_MOE_TRACE_OUT=str(file))
    result = probe.faking(model, STEPS, environment, n_seq=2)
    assert_same_answer(probe.stock(model, STEPS, n_seq=2), result)
    assert file.read_bytes() == b"GGUF...."
    assert sum("no trace is written: expected a new file or an earlier trace" in line for line in result.log.splitlines()) == 1


def shipped_traces() -> list[Path]:
    return sorted(GOLDEN.glob("*.trace"))


def test_the_recorded_traces_replay_to_the_golden_values():
    """tests/generate/record_traces.py has recorded them, and says how; every policy, with copies at once and late ones."""
    traces = shipped_traces()
    assert [trace.stem for trace in traces] == ["code", "manual", "prose", "switch"]
    rows = replay("--slots", GOLDEN_SLOTS, "--lag", "0,4", *traces)
    golden = json.loads((GOLDEN / "golden_shipped.json").read_text())
    found = [row | {"trace": Path(row["trace"]).name} for row in rows]
    assert [row.keys() for row in found] == [row.keys() for row in golden]
    for row, expected in zip(found, golden, strict=True):
        for name, value in expected.items():
            assert row[name] == (pytest.approx(value, abs=TOLERANCE) if isinstance(value, float) else value), row


def test_a_switch_of_kind_costs_a_policy_that_learns_least():
    """`default` is better than what only counts, and than what only remembers the last use; nothing beats Belady."""
    hits = {row["policy"]: row["hit"] for row in replay("--slots", "8", GOLDEN / "switch.trace")}
    assert hits["default"] > hits["lfu"] > hits["lru"]
    assert max(hits, key=hits.get) == "belady"


def test_the_recorded_traces_are_of_the_shipped_model(probe, tmp_path):
    result, trace, _ = traced(probe, shipped_model(), tmp_path)
    for recorded in map(Trace.read, shipped_traces()):
        assert recorded.fingerprint == trace.fingerprint
        assert recorded.layers == trace.layers
