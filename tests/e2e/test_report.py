"""What became of a recording is said in one line at the end, also when nothing was recorded."""

import re

import pytest

from fake import fake_environment
from hot import ends, starts
from models import generated
from paths import LAUNCHER, PLUGIN, STOCK_BIN
from probe import Result, decode
from processes import run, stock_environment


def our_lines(log: str) -> list[str]:
    return re.findall(r"moe-hot: (.*)", log)


def last_line(result: Result) -> str:
    return our_lines(result.log)[-1]


def test_requests_and_file_are_named(probe):
    result = probe.recording(generated("Q4_K"), [decode(5), decode(1)])
    layers = result.profile.raw["layers"]
    n_requests = sum(layer["cold_slots_total"] for layer in layers)
    counted = f"{n_requests} (token, expert) requests in {result.profile.layer_calls} calls of {len(layers)} layers"
    assert last_line(result) == f"recorded {counted}: {result.out_file}"
    assert len(our_lines(result.log)) == 2, "one line at the start, one at the end"


def test_only_large_batches_are_said_to_be_stocks(probe):
    result = probe.recording(generated("Q4_K"), [decode(64, outputs="all")])
    assert our_lines(result.log) == [
        "nothing was recorded: only batches of more than 31 tokens were computed, which are llama.cpp's"
    ]
    assert not result.out_file.exists()


def test_experts_elsewhere_are_said_to_be_elsewhere(probe, rpc_endpoint):
    options = {"rpc": rpc_endpoint, "n_gpu_layers": 99, "cpu_moe": False}
    result = probe.recording(generated("Q4_K"), [decode(5)], **options)
    assert len(our_lines(result.log)) == 1 and "no experts were placed with moe-hot" in last_line(result)
    assert not result.out_file.exists()


def test_a_threshold_that_leaves_us_nothing_is_said(tmp_path):
    out_file, log = tmp_path / "experts.json", tmp_path / "log"
    environment = stock_environment(
        GGML_BACKEND_PATH=str(PLUGIN), LLAMA_ARG_MOE_LAYER_PERF_OUT=str(out_file), GGML_OP_OFFLOAD_MIN_BATCH="1"
    )
    command = [STOCK_BIN / "llama-completion", "-m", generated("Q4_K"), "--cpu-moe", "-no-cnv", "-n", 4, "-p", "Once"]
    run(command, log, environment)
    lines = our_lines(log.read_text(errors="replace"))
    assert len(lines) == 1 and "inert: GGML_OP_OFFLOAD_MIN_BATCH is 1" in lines[0]
    assert not out_file.exists()


BENCH = ["-p", 0, "-n", 16, "-r", 1, "-t", 1]


@pytest.mark.parametrize("way", ["launcher", "plugin"])
@pytest.mark.parametrize("verbose", [(), ("-v",)], ids=["silent", "verbose"])
def test_a_program_that_silences_the_log_tells_all_the_same(tmp_path, way, verbose):
    """llama-bench, whose log callback does nothing unless -v is given. Each line once, and none among its results."""
    out_file, log = tmp_path / "experts.json", tmp_path / "log"
    arguments = ["-m", generated("Q4_K"), *BENCH, *verbose]
    if way == "launcher":
        environment = stock_environment()
        command = [LAUNCHER, "llama-bench", *arguments, "--moe-layer-perf-out", out_file]
    else:
        environment = stock_environment(GGML_BACKEND_PATH=str(PLUGIN), LLAMA_ARG_MOE_LAYER_PERF_OUT=str(out_file))
        command = [STOCK_BIN / "llama-bench", *arguments, "-ncmoe", 999]
    output = run(command, log, environment)
    start, end = our_lines(log.read_text(errors="replace"))
    assert start.startswith("recording expert usage of batches of 1 to 31 tokens")
    assert end.startswith("recorded ") and end.endswith(str(out_file))
    assert "moe-hot" not in output and "t/s" in output


@pytest.mark.parametrize("verbose", [(), ("-v",)], ids=["silent", "verbose"])
def test_a_cache_that_is_inert_in_a_silent_program_says_so(tmp_path, verbose):
    """Else two arms of an experiment that are equal look like a result."""
    log, profile = tmp_path / "log", tmp_path / "experts.json"
    run([LAUNCHER, "llama-bench", "-m", generated("Q4_K"), *BENCH, "--moe-layer-perf-out", profile], log, stock_environment())
    cache = ["--moe-hot-cache", profile, "--moe-hot-cache-max-mib", 4]
    run([LAUNCHER, "llama-bench", "-m", generated("Q4_K"), *BENCH, *cache, *verbose], log, stock_environment())
    (line,) = our_lines(log.read_text(errors="replace"))
    assert line.startswith("inert: no hot cache: ")


def test_a_cache_that_serves_a_silent_program_says_so(hot, tmp_path):
    log, profile = tmp_path / "log", hot.profile(generated("Q4_K"), [decode(1)])
    environment = fake_environment(plugin=PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=profile, MOE_HOT_TEST_SLOTS=8)
    run([STOCK_BIN / "llama-bench", "-m", generated("Q4_K"), *BENCH, "-ncmoe", 999], log, environment)
    text = log.read_text(errors="replace")
    assert len(starts(text)) == 1 and [end.hits > 0 for end in ends(text)] == [True]
