"""From which batch size on experts are copied to the GPU: measured by `moe-hot calibrate --model`, set by the launcher and the
patched programs, and harmless to everything else that the plugin does.

FakeDevice stands for the GPU: it offloads as CUDA does, its bus has a speed, and what it computes of experts takes no time. It is
found as CUDA's backend is, by the name of its file in the working directory."""

import json
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

import pytest

import paths
from conftest import shipped_model
from fake import ON_DEVICE, fake_environment, read_stats
from hot import complaints, ends
from launcher import launch, write_fake
from models import generated
from patched import needs_build
from probe import assert_same_answer, decode, greedy
from processes import HANG_S, stock_environment, wait_for
from server import GREEDY, start

VARIABLE, FACT = "GGML_OP_OFFLOAD_MIN_BATCH", "MOE_HOT_MEASURED_MIN_BATCH"
NULL = {"FAKE_NULL_COMPUTE": "1", "FAKE_NULL_MUL_MAT_ID_ONLY": "1"}
NEVER = 1_000_000
UBATCH = 512  # llama.cpp's default
MEASURED = 200
RECORD = "--moe-layer-perf-out"


def folder_with_gpu(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "libggml-cuda.so").symlink_to(paths.FAKE)
    return folder


def calibrate(folder: Path, model: Path, threads: int, mbs: int) -> Path:
    """The file that was stored."""
    environment = stock_environment(XDG_CONFIG_HOME=str(folder / "config"), FAKE_BANDWIDTH_MBS=str(mbs), **NULL)
    command = [paths.LAUNCHER, "calibrate", "-t", str(threads), "--model", model]
    subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, timeout=HANG_S)
    return folder / "config/moe-hot/calibration.json"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A configuration folder with a threshold for the shipped model and one thread."""
    folder = folder_with_gpu(tmp_path_factory.mktemp("measured"))
    file = calibrate(folder, shipped_model(), 1, 0)
    stored = json.loads(file.read_text())
    (prompts,) = stored["prompts"]
    assert [prompt["n_tokens"] for prompt in prompts["prompts"]] == [32, 64, 128, 256, 512]
    assert all(prompt["cpu_ms"] > 0 and prompt["copied_ms"] > 0 for prompt in prompts["prompts"])
    assert prompts["n_threads"] == 1 and 32 <= prompts["min_batch"] <= 513
    prompts["min_batch"] = MEASURED
    file.write_text(json.dumps(stored))
    return folder / "config"


# ---- who sets it


def told(answer) -> tuple[str | None, str | None]:
    environment = answer.started["environment"]
    return environment.get(VARIABLE), environment.get(FACT)


def test_the_launcher_sets_what_was_measured_unless_the_user_has(measured, tmp_path):
    help_text = """\
-m,    --model FNAME                    model path to load
                                        (env: LLAMA_ARG_MODEL)
-t,    --threads N                      threads
                                        (env: LLAMA_ARG_THREADS)
-ngl,  --gpu-layers, --n-gpu-layers N   layers
                                        (env: LLAMA_ARG_N_GPU_LAYERS)
-lm,   --load-mode MODE                 how to read
                                        (env: LLAMA_ARG_LOAD_MODE)
--op-offload, --no-op-offload           whether to offload
-cmoe, --cpu-moe                        keep all experts in the CPU
                                        (env: LLAMA_ARG_CPU_MOE)"""
    fake = write_fake(tmp_path / "llama-fake", help_text=help_text)
    model, record = shipped_model(), [RECORD, tmp_path / "experts.json"]

    def started(*arguments, **environment):
        environment = {"XDG_CONFIG_HOME": str(measured), **environment}
        return told(launch(fake, *arguments, **environment))

    usual = ["-m", model, "-t", "1", *record]
    assert started(*usual) == (str(MEASURED), "1")
    assert started(*usual[:2], *record, LLAMA_ARG_THREADS="1") == (str(MEASURED), "1")
    assert started(*usual, **{VARIABLE: "64"}) == ("64", None)
    assert started(*usual, **{VARIABLE: ""}) == ("", None)
    for other in (["--no-op-offload"], ["-t", "2"], ["-ngl", "3"], ["-lm", "none"], ["-m", generated("Q4_K")]):
        assert started(*usual, *other) == (None, None), other
    assert started(*usual[:-2]) == (None, None), "nothing of ours is asked for"
    assert started(*usual, XDG_CONFIG_HOME=str(tmp_path)) == (None, None), "nothing is known"
    (tmp_path / "moe-hot").mkdir()
    stored = (measured / "moe-hot/calibration.json").read_text()
    for unknown in ("{", stored.replace('CPUs"', 'CPUs of another"'), stored.replace(str(MEASURED), "32")):
        (tmp_path / "moe-hot/calibration.json").write_text(unknown)
        assert started(*usual, XDG_CONFIG_HOME=str(tmp_path)) == (None, None), unknown[:100]


@needs_build
@pytest.mark.parametrize("program", ["llama-server", "llama-bench"])
def test_patched_programs_set_what_was_measured_unless_the_user_has(measured, tmp_path, program):
    folder = folder_with_gpu(tmp_path / "gpu")
    arguments = ["-n", "1", "-p", "0", "-r", "20000"] if program == "llama-bench" else ["--port", "0"]
    command = [paths.PATCHED_BIN / program, "-m", shipped_model(), "-t", "1", RECORD, tmp_path / "experts.json", *arguments]
    for given, expected in (({}, (str(MEASURED), "1")), ({VARIABLE: "64"}, ("64", None)), ({"no": "1"}, (None, None))):
        extra = ["-nopo", "1"] if program == "llama-bench" else ["--no-op-offload"]
        words = [str(word) for word in (*command, *(extra if "no" in given else []))]
        environment = stock_environment(XDG_CONFIG_HOME=str(measured), **given)
        with open(tmp_path / "log", "wb") as log:
            child = subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            wait_for("its threads compute", lambda: RECORDING in (tmp_path / "log").read_text(errors="replace"))
            variables = dict(
                pair.split("=", 1) for pair in Path(f"/proc/{child.pid}/environ").read_text().split("\0") if "=" in pair
            )
        finally:
            child.kill()
            child.wait()
        assert (variables.get(VARIABLE), variables.get(FACT)) == expected, (tmp_path / "log").read_text(errors="replace")


RECORDING = "recording expert usage of batches of 1 to"


# ---- what it changes


def test_batches_that_are_ours_by_measurement_are_computed_as_stock_does_and_nothing_else_changes(hot, tmp_path):
    model = generated("Q4_K")
    steps = [decode(1), decode(5), decode(64), greedy(3), decode(256), decode(31), decode(32), decode(700), greedy(3)]
    profile = hot.profile(model, [decode(1), decode(5), greedy(3)])
    options = {**ON_DEVICE, "cpu_moe": True, "n_ctx": 2048}

    def run(**variables):
        """With everything but experts on FakeDevice, so that llama.cpp offloads to it."""
        stats = tmp_path / f"stats-{len(variables) and variables[VARIABLE]}"
        cache = {"LLAMA_ARG_MOE_HOT_CACHE": profile, "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0, "MOE_HOT_TEST_SLOTS": 8}
        environment = fake_environment(plugin=paths.PLUGIN, stats=stats, **cache, **variables)
        return hot.probe.faking(model, steps, environment, **options), read_stats(stats)["mul_mat_id_nodes"]

    usual, n_offloaded = run()
    (expected,) = ends(usual.log)
    # With one thread too: attention over many tokens is rounded by their number.
    stock = hot.probe.stock(model, steps, n_ctx=2048, n_threads=1)
    assert_same_answer(stock, usual)
    for threshold in (33, 512, NEVER):
        ours, n_fewer = run(**{VARIABLE: threshold, FACT: "1"})
        assert_same_answer(stock, ours)
        assert ends(ours.log)[0].hits > 0 and complaints(ours.log) == [], threshold
        assert [(end.hits, end.misses) for end in ends(ours.log)] == [(expected.hits, expected.misses)], "not counted"
        assert n_fewer < n_offloaded, threshold
        n_offloaded = n_fewer


# ---- what it brings


class Timed:
    """A server, its experts on the CPU, behind a bus of so many MB/s."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path, mbs: int, config: Path, **variables: str):
        folder_with_gpu(folder)
        arguments = ["--no-repack", "--no-warmup", "-t", 2, "-c", 2048, "-np", 1, RECORD, folder / "experts.json"]
        command = [paths.LAUNCHER, paths.to_launch("llama-server"), "-m", model, *arguments]
        environment = stock_environment(XDG_CONFIG_HOME=str(config), FAKE_BANDWIDTH_MBS=str(mbs), **NULL, **variables)
        self.server = stack.enter_context(start(command, folder, "server", environment))

    def ms(self, prompt: list[int]) -> float:
        body = {"prompt": prompt, "n_predict": 1, **GREEDY}
        timings = self.server._post("/completion", body).json()["timings"]
        assert timings["prompt_n"] == len(prompt)
        return timings["prompt_ms"]


def offloaded(n_tokens: int, threshold: int) -> tuple[bool, ...]:
    """Which of a prompt's batches are offloaded with a threshold."""
    return tuple(min(UBATCH, n_tokens - start) >= threshold for start in range(0, n_tokens, UBATCH))


@pytest.mark.full
@pytest.mark.parametrize("mbs", [1_000, 25_000])
def test_the_first_token_comes_as_early_as_with_the_best_fixed_threshold(tmp_path, mbs):
    """Servers are asked in turns, so that whatever else the machine does falls on all of them."""
    model, n_rounds = generated("Q4_K", "qwen3moe-bench-sparse"), 41
    stored = calibrate(folder_with_gpu(tmp_path / "calibrate"), model, 2, mbs)
    threshold = json.loads(stored.read_text())["prompts"][0]["min_batch"]
    chooser = random.Random(1)
    with ExitStack() as stack:
        servers = {"measured": Timed(stack, tmp_path / "measured", model, mbs, stored.parents[1])}
        for fixed in (32, 128, 256, 512, NEVER):
            servers[str(fixed)] = Timed(stack, tmp_path / str(fixed), model, mbs, tmp_path, **{VARIABLE: str(fixed)})
        for n_tokens in (64, 256, 700):
            times = {name: [] for name in servers}
            for n in range(n_rounds + 1):
                prompt = [chooser.randrange(256) for _ in range(n_tokens)]
                names = list(servers)
                for name in names[n % len(names) :] + names[: n % len(names)]:
                    times[name].append(servers[name].ms(prompt))
            # Servers with other thresholds that offload the same of this prompt's batches do the same: they are one way.
            ways: dict[tuple, list[str]] = {}
            for name in servers:
                ways.setdefault(offloaded(n_tokens, threshold if name == "measured" else int(name)), []).append(name)
            rounds = {way: [median(times[name][n] for name in names) for n in range(1, n_rounds + 1)] for way, names in ways.items()}
            best = min(rounds, key=lambda way: median(rounds[way]))
            ours = rounds[offloaded(n_tokens, threshold)]
            low, middle, high = quantiles(a / b for a, b in zip(ours, rounds[best], strict=True))
            ms = {"/".join(names): round(median(rounds[way]), 1) for way, names in ways.items()}
            print(f"{mbs} MB/s, threshold {threshold}, {n_tokens} tokens: {ms}: {middle:.3f} ({low:.3f} to {high:.3f})")
            assert middle <= 1.05, (n_tokens, ms)
        for timed in servers.values():
            timed.server.stop()
