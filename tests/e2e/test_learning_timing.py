"""What learning costs and brings in time: copies in the background are never waited for, `auto` follows the bus, and a
cache that loses for long is given up.

Servers are asked in turns, so that whatever else the machine does falls on all of them. FakeDevice computes nothing and
takes no time for it: what is measured is the CPU's part and the bus's."""

import re
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import pytest

import gguf
import paths
import vulkan
from conftest import shipped_model
from fake import fake_environment, read_stats
from hot import complaints, ends, starts
from learning import AS_IT_PAYS, MAX_MIB, MISS, UPDATE_RATE
from models import generated
from probe import assert_same_answer, decode, greedy, until
from processes import wait_for
from server import GREEDY, Server, start
from ways_models import large_qwen3moe
from writer import Sizes

# Experts of 3 MiB, rows of 1 KiB.
SIZES = Sizes(n_expert=16, n_expert_used=2, n_ff=2048)
SLOTS, SPARE = 8, 1
NULL = {"null_compute": 1, "null_mul_mat_id_only": 1}
A_SECOND_PER_EXPERT_MBS = 4
FAST_MBS, SLOW_MBS = 25_000, 1_000


@pytest.fixture(scope="module")
def large(tmp_path_factory, hot) -> tuple[Path, Path]:
    """A model, and its profile."""
    model = large_qwen3moe(tmp_path_factory.mktemp("large") / "large.gguf", SIZES)
    return model, hot.probe.recording(model, [decode(1), greedy(40)]).out_file


class Timed:
    """A server with a cache on a FakeDevice whose bandwidth can be changed."""

    def __init__(self, stack: ExitStack, folder: Path, large, bandwidth: int, slots: int, **variables):
        folder.mkdir()
        model, profile = large
        self.control = folder / "control"
        self.set_bandwidth(bandwidth)
        environment = fake_environment(
            plugin=paths.PLUGIN,
            control=self.control,
            LLAMA_ARG_MOE_HOT_CACHE=profile,
            MOE_HOT_TEST_SLOTS=slots,
            **NULL,
            **variables,
        )
        arguments = ["--no-repack", "--no-warmup", "-t", 1, "-c", 4096, "-np", 1, "--cpu-moe", "-ngl", 0]
        command = [paths.STOCK_BIN / "llama-server", "-m", model, *arguments]
        self.server: Server = stack.enter_context(start(command, folder, "server", environment))

    def set_bandwidth(self, mbs: int) -> None:
        new = self.control.with_suffix(".new")
        new.write_text(f"bandwidth_mbs={mbs}\n")
        new.rename(self.control)

    def ms_per_token(self, n_predict: int) -> float:
        body = {"prompt": [1, 2, 3], "n_predict": n_predict, **GREEDY}
        return self.server._post("/completion", body).json()["timings"]["predicted_per_token_ms"]


def in_turns(servers: dict[str, Timed], n_rounds: int, n_predict: int) -> dict[str, list[float]]:
    """Milliseconds per token, of every round."""
    times: dict[str, list] = {name: [] for name in servers}
    for n in range(n_rounds):
        names = list(servers)
        for name in names[n % len(names) :] + names[: n % len(names)]:
            times[name].append(servers[name].ms_per_token(n_predict))
    return times


def ratio(times: dict[str, list[float]], a: str, b: str) -> float:
    """The median of the rounds' ratios."""
    return median(x / y for x, y in zip(times[a], times[b], strict=True))


def assert_worked(timed: Timed, rule: str) -> None:
    timed.server.stop()
    log = timed.server.log.read_text()
    (end,) = ends(log)
    assert end.hits > 0, rule
    assert complaints(log) == [], rule


@pytest.mark.full
def test_copies_in_the_background_are_never_waited_for(large, tmp_path):
    """An expert takes most of a second. With the same residents at the start, no slower than a set that is fixed."""
    with ExitStack() as stack:
        learning = {UPDATE_RATE: 1}
        servers = {
            "fixed": Timed(stack, tmp_path / "fixed", large, FAST_MBS, SLOTS - SPARE, **{UPDATE_RATE: 0}),
            **{
                rule: Timed(stack, tmp_path / rule, large, FAST_MBS, SLOTS, **learning, **{MISS: rule})
                for rule in ("cpu", "auto")
            },
        }
        for timed in servers.values():
            timed.ms_per_token(8)
            assert starts(timed.server.log.read_text())
            timed.set_bandwidth(A_SECOND_PER_EXPERT_MBS)
            timed.ms_per_token(50)
        times = in_turns(servers, n_rounds=25, n_predict=60)
        ratios = {rule: ratio(times, rule, "fixed") for rule in ("cpu", "auto")}
        print(ratios)
        for rule, timed in servers.items():
            assert_worked(timed, rule)
    assert max(ratios.values()) < 1.02


@pytest.mark.full
def test_auto_is_as_good_as_the_better_rule_before_and_after_the_bus_slows_down(large, tmp_path):
    with ExitStack() as stack:
        servers = {
            rule: Timed(stack, tmp_path / rule, large, FAST_MBS, SLOTS, **{UPDATE_RATE: 1, MISS: rule})
            for rule in ("cpu", "copy", "auto")
        }
        measured = []
        for bandwidth in (FAST_MBS, SLOW_MBS):
            for timed in servers.values():
                timed.set_bandwidth(bandwidth)
                timed.ms_per_token(50)
            measured.append(in_turns(servers, n_rounds=25, n_predict=50))
        ratios = [max(ratio(times, "auto", rule) for rule in ("cpu", "copy")) for times in measured]
        print(ratios, [{rule: median(samples) for rule, samples in times.items()} for times in measured])
        for rule, timed in servers.items():
            assert_worked(timed, rule)
    assert max(ratios) < 1.05


N_LAYERS, N_USED = 3, 4
LONG = [decode(1), greedy(500)]
OFF = re.compile(r"hot cache of this model off on FAKE0: a layer takes (\d+) µs with it and (\d+) µs without")
GUARDED = {"MOE_HOT_TEST_NO_GUARD": 0, "MOE_HOT_TEST_WAIT": 0}
WARM_UPS = N_LAYERS * N_USED


def session(hot, environment: dict, steps=LONG, **fake):
    model = generated("Q4_K")
    profile = hot.profile(model, [decode(1), greedy(100)])
    options = {"n_ctx": 4096, "n_threads": 1}
    ours = hot.run(model, steps, profile, fake=fake, environment=GUARDED | {MAX_MIB: 4} | environment, **options)
    assert_same_answer(hot.probe.stock(model, steps, **options), ours)
    assert ours.stats["allocated_bytes"] == 0
    return ours


@pytest.mark.parametrize("environment", [AS_IT_PAYS, {}], ids=["learning", "fixed"])
def test_a_device_that_is_far_slower_is_given_up_before_a_token_uses_it(hot, environment):
    """It takes 20 ms for any graph, and the CPU a fraction of one for a layer."""
    latency_us = 20_000
    too_slow = N_LAYERS * 2  # each layer's smallest graph, which is given a second chance
    warm = until("mul_mat_id_graphs", too_slow)
    result = session(hot, environment, [decode(1), greedy(100), warm, greedy(1500)], latency_us=latency_us)
    (line,) = result.complaints
    ours, cold = map(int, OFF.search(line).groups())
    assert ours >= latency_us and ours > cold
    assert "answers stay the same" in line
    assert result.hits == 0
    # Once more where what a token takes without it has become known better.
    assert too_slow <= result.stats["mul_mat_id_graphs"] <= 2 * too_slow


@pytest.mark.full
@pytest.mark.parametrize("environment", [AS_IT_PAYS, {}], ids=["learning", "fixed"])
def test_a_cache_that_does_not_lose_is_left_alone(hot, environment):
    """The device takes no time: rows are zeros, so that the answer is not compared. As slow as many calls may be: what the
    machine does beside falls on calls with and without the device."""
    model = generated("Q4_K")
    profile = hot.profile(model, [decode(1), greedy(100)])
    warm = until("mul_mat_id_graphs", WARM_UPS)
    steps = [decode(1), greedy(100), warm, greedy(500)]
    result = hot.run(
        model, steps, profile, fake=NULL, environment=GUARDED | {MAX_MIB: 4} | environment, n_ctx=4096, n_threads=1
    )
    assert result.complaints == []
    assert result.hits > 0


N_PAIRS, N_TOKENS, LEAST_SPEED = 5, 500, 0.97
DEVICES = {"slow bus": {"bandwidth_mbs": SLOW_MBS}, "slow device": {"latency_us": 150}, "far slower": {"latency_us": 5000}}
N_DRAFTED, SEQUENCES = 4, (0, 1, 2, 3)
WORKLOADS = {
    "one token": [decode(1), greedy(N_TOKENS)],
    "draft of 4": [decode(1), *[decode(1 + N_DRAFTED, seed=n) for n in range(N_TOKENS // (1 + N_DRAFTED))]],
    "four sequences": [decode(dict.fromkeys(SEQUENCES, 1)), greedy(N_TOKENS // len(SEQUENCES), SEQUENCES)],
}
SHARES = [0.1, 0.35, 0.8]
CASES = [("one token", share) for share in SHARES] + [(name, 0.35) for name in list(WORKLOADS)[1:]]


def tokens_ms(result) -> float:
    return sum(batch["microseconds"] for batch in result.batches[1:]) / 1000


def guarded_model() -> Path:
    return generated("Q4_K", "qwen3moe-bench-half")


def experts_mib(model: Path) -> float:
    return sum(tensor.n_bytes for tensor in gguf.GGUFReader(model).tensors if "_exps" in tensor.name) / 2**20


def on_device(hot, device: str, model: Path, steps: list, profile: Path, cache: dict, **options):
    """A run with a cache on FakeDevice, slow in some way, or on Vulkan."""
    environment = GUARDED | AS_IT_PAYS | cache
    if device != "Vulkan":
        return hot.run(model, steps, profile, fake=DEVICES[device], environment=environment, **options)
    vulkan.require()
    ours = {"LLAMA_ARG_MOE_HOT_CACHE": profile, "LLAMA_ARG_MOE_HOT_CACHE_DEVICE": vulkan.DEVICE}
    variables = vulkan.vulkan_environment(plugin=paths.PLUGIN, **ours, **environment)
    return hot.probe.faking(model, steps, variables, **options)


@pytest.mark.full
@pytest.mark.parametrize(("workload", "share"), CASES)
@pytest.mark.parametrize("device", [*DEVICES, "Vulkan"])
def test_it_is_never_slower(hot, device, workload, share):
    """500 tokens with a cache, and as many without one, in turns: the fill is part of it. Of a model whose tokens take
    milliseconds: where 500 take half a second, a run says more of the machine than of the cache."""
    steps, model = WORKLOADS[workload], guarded_model()
    profile = hot.profile(model, [decode(1), greedy(100)], n_threads=2)
    cache = {MAX_MIB: round(share * experts_mib(model))}
    options = {"n_ctx": 1024, "n_threads": 1, "n_seq": len(SEQUENCES)}
    ratios = []
    for n in range(2 * N_PAIRS):
        if n % 2:
            ratios.append(without / tokens_ms(on_device(hot, device, model, steps, profile, cache, **options)))
        else:
            without = tokens_ms(hot.probe.recording(model, steps, **options))
    print(f"{device}, {workload}, {share:.0%}: {median(ratios):.3f} of the speed without a cache ({min(ratios):.3f} to {max(ratios):.3f})")
    assert median(ratios) >= LEAST_SPEED


POOLS_AND_SCRATCH = 3 << 20  # of a budget of 4 MiB


def given_back(stats: dict[str, int]) -> int:
    return stats["peak_bytes"] - stats["allocated_bytes"]


def test_a_cache_that_is_given_up_gives_its_memory_back_while_the_server_lives(hot, tmp_path):
    """FakeDevice writes what it holds whenever a buffer is freed."""
    model, stats = generated("Q4_K"), tmp_path / "stats"
    environment = fake_environment(
        plugin=paths.PLUGIN,
        stats=stats,
        latency_us=20_000,
        LLAMA_ARG_MOE_HOT_CACHE=hot.profile(model, [decode(1), greedy(100)]),
        **{MAX_MIB: 4},
        **GUARDED,
    )
    arguments = ["--no-repack", "--no-warmup", "-t", 1, "-c", 4096, "-np", 1, "--cpu-moe", "-ngl", 0]
    with start([paths.STOCK_BIN / "llama-server", "-m", model, *arguments], tmp_path, "server", environment) as server:
        server.complete("x", 300)
        wait_for("the cache is given up", lambda: OFF.search(server.log.read_text()) or not server.complete("x", 100))
        # llama.cpp has buffers of its own on the device.
        wait_for("the memory is given back", lambda: given_back(read_stats(stats)) > POOLS_AND_SCRATCH)
        server.stop()
