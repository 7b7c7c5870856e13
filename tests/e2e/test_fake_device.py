"""FakeDevice is a fair stand-in for a GPU: llama.cpp uses it, and the answer is the CPU's, bit for bit."""

import json
import re

import pytest

from experts_json import Profile
from fake import FAKE_DEVICE, ON_DEVICE, fake_environment, read_stats
from models import generated
from paths import PLUGIN, PROBE, STOCK_BIN
from probe import DEVICE, assert_meaningful, assert_same_answer, decode, differ, greedy
from processes import HANG_S, process, run
from test_equality import CHANGING_BATCHES, TWO_CONTEXTS

ON_CPU = {"n_threads": 1}
SHORT = [decode(5), greedy(4)]


@pytest.mark.parametrize("cpu_moe", [False, True])
def test_the_answer_is_the_cpus(probe, model_of_two, tmp_path, cpu_moe):
    stock = probe.stock(model_of_two, CHANGING_BATCHES, **ON_CPU)
    environment = fake_environment(stats=tmp_path / "stats")
    ours = probe.faking(model_of_two, CHANGING_BATCHES, environment, cpu_moe=cpu_moe, **ON_DEVICE)
    assert_meaningful(stock)
    assert_same_answer(stock, ours)
    assert FAKE_DEVICE in ours.devices
    stats = read_stats(tmp_path / "stats")
    assert stats["graphs"] > len(CHANGING_BATCHES)
    assert stats["mul_mat_id_nodes"] > 0  # with experts on the CPU too: large batches are offloaded
    assert stats["allocated_bytes"] == 0


@pytest.mark.parametrize("setting", ["host_buffer", "integrated"])
def test_the_answer_is_the_cpus_with(probe, setting):
    model = generated("Q4_K")
    stock = probe.stock(model, CHANGING_BATCHES, **ON_CPU)
    environment = fake_environment(**{setting: 1})
    assert_same_answer(stock, probe.faking(model, CHANGING_BATCHES, environment, **ON_DEVICE))


def test_two_contexts_at_once(probe):
    options = {"contexts": 2, **ON_DEVICE}
    model = generated("Q4_K")
    stock = probe.stock(model, TWO_CONTEXTS, contexts=2, **ON_CPU)
    assert_same_answer(stock, probe.faking(model, TWO_CONTEXTS, fake_environment(), **options))


@pytest.mark.parametrize(
    ("op", "cases"),
    [
        ("MUL_MAT_ID", "type_a=(f16|q4_K),type_b=f32,n_mats=4,n_used=2,b=0,m=512,n=(1|32|129),"),
        ("SWIGLU", "."),
        ("ADD_ID", "."),
        ("GET_ROWS", "type=(f32|q4_0|q6_K),n=256,m=5,r=4,be1=(1|7),"),
        ("RMS_NORM_MUL_ADD", "."),
        ("CPY", "type_src=f32,type_dst=(f16|q8_0)"),
    ],
)
def test_llamas_own_operator_tests_pass(tmp_path, op, cases):
    command = [STOCK_BIN / "test-backend-ops", "test", "-b", FAKE_DEVICE, "-o", op, "-p", cases]
    output = run(command, tmp_path / "log", fake_environment(stats=tmp_path / "stats"))
    passed, total = re.findall(r"(\d+)/(\d+) tests passed", output)[0]
    assert int(passed) == int(total) > 0
    assert read_stats(tmp_path / "stats")["graphs"] > 0


@pytest.mark.parametrize("cpu_moe", [False, True])
def test_the_plugin_gets_in_with_it(probe, model_of_two, tmp_path, cpu_moe):
    """The plugin records where the experts are its own, and the answer stays that of FakeDevice alone."""
    options = {"cpu_moe": cpu_moe, **ON_DEVICE}
    alone = probe.faking(model_of_two, CHANGING_BATCHES, fake_environment(), **options)
    out_file = tmp_path / "experts.json"
    environment = fake_environment(plugin=PLUGIN, LLAMA_ARG_MOE_LAYER_PERF_OUT=out_file)
    both = probe.faking(model_of_two, CHANGING_BATCHES, environment, **options)
    assert both.devices.index(FAKE_DEVICE) < both.devices.index(DEVICE)
    assert both.devices.count(FAKE_DEVICE) == both.devices.count(DEVICE) == 1
    assert_same_answer(alone, both)
    assert out_file.exists() == cpu_moe
    if cpu_moe:
        assert Profile.read(out_file).layer_calls > 0


def run_to_failure(tmp_path, steps: list = SHORT, cpu_moe: bool = False, **settings) -> str:
    """Runs moe-probe, which must fail by itself (exit code 1, no signal), and returns its log."""
    scenario, log = tmp_path / "run.json", tmp_path / "log"
    what = {"model": str(generated("Q4_K")), "steps": steps, "cpu_moe": cpu_moe, **ON_DEVICE}
    scenario.write_text(json.dumps(what))
    with process([PROBE, scenario, tmp_path], log, fake_environment(**settings)) as child:
        code = child.wait(timeout=HANG_S)
    assert code == 1, f"exit code {code}"
    return log.read_text(errors="replace")


@pytest.mark.parametrize("settings", [{"capacity_mib": 1}, {"fault": "alloc=1"}, {"fault": "alloc_over_mib=1"}])
def test_memory_that_does_not_suffice_is_reported(tmp_path, settings):
    log = run_to_failure(tmp_path, **settings)
    assert re.search("unable to allocate .*FAKE0", log), log[-2000:]


def test_an_instance_that_cannot_be_made_is_reported(tmp_path):
    log = run_to_failure(tmp_path, fault="init=1")
    assert "failed to initialize FAKE0 backend" in log, log[-2000:]


def test_memory_reported_is_the_capacity(tmp_path):
    command = [STOCK_BIN / "llama-completion", "--list-devices"]
    output = run(command, tmp_path / "log", fake_environment(capacity_mib=123))
    assert "FAKE0" in output and "123 MiB, 123 MiB free" in output


def test_a_setting_that_is_not_known_is_named(tmp_path):
    log = tmp_path / "log"
    output = run([STOCK_BIN / "llama-completion", "--list-devices"], log, fake_environment(latency=1))
    assert "FAKE0" not in output
    assert 'FAKE_LATENCY: there is no setting "latency"' in log.read_text()


def test_latency_is_added_to_every_graph(probe, tmp_path):
    latency_us = 20_000
    environment = fake_environment(stats=tmp_path / "stats", latency_us=latency_us)
    result = probe.faking(generated("Q4_K"), SHORT, environment, cpu_moe=False, **ON_DEVICE)
    assert all(batch["microseconds"] >= latency_us for batch in result.batches)


def test_null_compute_is_restricted_to_small_graphs_with_experts(probe, tmp_path):
    """With the whole model on the device every graph is large, so that nothing changes."""
    stock = probe.stock(generated("Q4_K"), SHORT, **ON_CPU)
    environment = fake_environment(null_compute=1, null_mul_mat_id_only=1, latency_us=20_000)
    ours = probe.faking(generated("Q4_K"), SHORT, environment, cpu_moe=False, **ON_DEVICE)
    assert_same_answer(stock, ours)
    everything = probe.faking(generated("Q4_K"), SHORT, fake_environment(null_compute=1), cpu_moe=False, **ON_DEVICE)
    assert differ(stock, everything)


def test_a_copy_that_never_arrives_changes_the_answer(probe, tmp_path):
    """Experts of the CPU's that the scheduler offloads for large batches are copied asynchronously."""
    steps = [decode(64)]
    stock = probe.stock(generated("Q4_K"), steps, **ON_CPU)
    environment = fake_environment(fault="copy=1", stats=tmp_path / "stats")
    ours = probe.faking(generated("Q4_K"), steps, environment, **ON_DEVICE)
    assert read_stats(tmp_path / "stats")["faults"] > 0
    assert differ(stock, ours)


def test_a_computation_that_fails_is_reported(tmp_path):
    log = run_to_failure(tmp_path, steps=[decode(64)], cpu_moe=True, fault="compute=1")
    assert "failed" in log.lower(), log[-2000:]


def test_settings_change_while_running(probe, tmp_path):
    """The control file's word comes after the environment's, which would make this last for days."""
    control = tmp_path / "control"
    control.write_text("latency_us=0\n")
    environment = fake_environment(control=control, latency_us=10**11)
    assert probe.faking(generated("Q4_K"), SHORT, environment, cpu_moe=False, **ON_DEVICE).batches
