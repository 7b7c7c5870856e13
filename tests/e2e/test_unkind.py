"""What makes real devices unkind: they wait when they see a graph for the first time, report free memory that moves, keep
the caller waiting for copies from ordinary memory, and have one bus for everybody. FakeDevice does it on demand."""

import json

import pytest

from fake import ON_DEVICE, fake_environment
from hot import CALLS_BEFORE_FILL, complaints, starts
from learning import Learning
from models import generated
from paths import PLUGIN
from probe import assert_same_answer, decode, greedy, until
from ways_models import large_qwen3moe
from writer import Sizes

N_LAYERS, N_EXPERT, N_USED = 3, 16, 4
PROFILE_STEPS = [decode(1), greedy(100)]
UNATTENDED = {"MOE_HOT_TEST_WAIT": 0}
FIRST_USE_MS = 1000


def run(hot, steps: list, fake: dict, **options):
    model = generated("Q4_K")
    profile = hot.profile(model, PROFILE_STEPS)
    ours = hot.run(model, steps, profile, fake=fake, **options)
    probe_options = {name: value for name, value in options.items() if name not in ("slots", "environment")}
    assert_same_answer(hot.probe.stock(model, steps, **probe_options), ours)
    assert complaints(ours.log) == []
    return ours


def slowest_ms(result) -> float:
    return max(batch["microseconds"] for batch in result.batches) / 1000


def test_no_token_waits_for_the_first_use_of_a_graph(hot):
    """There is one kind of graph for each number of hits, and each takes a second at first."""
    steps = [decode(1), greedy(CALLS_BEFORE_FILL + 30), until("first_uses", N_USED), greedy(300)]
    slow = {"first_use_ms": FIRST_USE_MS}
    result = run(hot, steps, slow, environment=UNATTENDED)
    assert result.stats["first_uses"] == N_USED
    assert slowest_ms(result) < FIRST_USE_MS, "what a token that waits takes at least"
    waiting = run(hot, steps, slow)
    assert slowest_ms(waiting) > FIRST_USE_MS, "a token that waits would be seen"


def test_tokens_use_the_device_once_it_knows_the_graphs(hot):
    steps = [decode(1), greedy(CALLS_BEFORE_FILL + 30), until("mul_mat_id_graphs", N_LAYERS * N_USED), greedy(300)]
    result = run(hot, steps, {}, environment=UNATTENDED)
    assert result.hits > 0


def test_a_context_whose_graphs_are_all_new_uses_the_device_too(hot):
    """As with batches of ever other sizes: what was asked for one graph holds for the next."""
    steps = [decode(1), greedy(CALLS_BEFORE_FILL + 30), until("mul_mat_id_graphs", N_LAYERS * N_USED), greedy(100)]
    result = run(hot, steps, {}, environment=UNATTENDED | {"LLAMA_GRAPH_REUSE_DISABLE": 1})
    assert result.hits > 50 * N_LAYERS
    assert result.end.graphs < 100, "each is made once"


N_STARTS = 20


def test_every_start_with_one_budget_has_the_same_slots_and_hits(hot):
    """Whatever the device says is free: up to half of its memory less than there is."""
    runs = [run(hot, PROFILE_STEPS, {"free_jumps_mib": 2048}, environment={"LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": 4}) for _ in range(N_STARTS)]
    assert len({(start.mib, start.slots) for result in runs for start in starts(result.log)}) == 1
    assert all(result.hits > 0 for result in runs)


def test_what_a_device_takes_behind_our_back_has_room(hot):
    """24 KiB for each kind of graph, of 4 MiB. Where there is none left the process is aborted."""
    growing = {"capacity_mib": 4, "first_use_kib": 24}
    result = run(hot, PROFILE_STEPS, growing, environment={"LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": 100})
    assert result.start.slots < N_EXPERT, "all of the device was asked for"
    assert result.stats["first_uses"] == N_USED
    assert result.hits > 0


@pytest.mark.parametrize("options", [{"LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": 100}, {"LLAMA_ARG_MOE_HOT_CACHE_AUTO_RESERVE_MIB": 0}])
def test_a_floor_stays_free_in_every_mode(hot, options):
    """A device of 4 MiB, of which 1/32 is left to what backends take later."""
    result = run(hot, PROFILE_STEPS, {"capacity_mib": 4}, environment=options)
    assert result.start.slots < N_EXPERT
    assert 0 < result.stats["peak_bytes"] <= (4 << 20) * 31 / 32


def test_the_device_is_asked_for_its_memory_once_per_fill(hot):
    """Not for each layer: a driver can take long to answer. For its properties too, and not while tokens are decoded."""
    copied = until("large_writes", 1)
    ours = run(hot, [*PROFILE_STEPS, copied], {"fault_min_bytes": 32768})
    longer = run(hot, [*PROFILE_STEPS, copied, greedy(100)], {"fault_min_bytes": 32768})
    without = hot.probe.faking(generated("Q4_K"), PROFILE_STEPS, fake_environment(stats=hot.probe.folder / "stats-without"))
    assert without.devices
    stock = json.loads((hot.probe.folder / "stats-without").read_text())
    assert ours.stats["memory_queries"] - stock["memory_queries"] <= 1
    print({name: (stock[name], ours.stats[name], longer.stats[name]) for name in ("memory_queries", "property_queries")})
    for query in ("memory_queries", "property_queries"):
        assert ours.stats[query] == longer.stats[query]


def layer_ms(timings: dict, lap: str) -> float:
    return timings["mixed"][lap] / timings["mixed"]["calls"] / 1e6


@pytest.mark.parametrize("no_host", [False, True], ids=["no host buffer", "--no-host"])
def test_a_copy_to_ordinary_memory_does_not_hold_the_cpu_up(hot, tmp_path, no_host):
    """The device takes 20 ms for a layer, and rows come back into memory that is not page-locked: the CPU's part begins
    before they do."""
    latency_ms, times = 20, tmp_path / "times.json"
    fake = {"latency_us": latency_ms * 1000, "null_mul_mat_id_only": 1, "pageable_blocks": 1, "host_buffer": int(no_host)}
    steps = [decode(1), greedy(CALLS_BEFORE_FILL + 20)]
    environment = {"MOE_HOT_TEST_TIMINGS": times} | ({"LLAMA_ARG_NO_HOST": 1} if no_host else {})
    result = run(hot, steps, fake, slots=N_EXPERT // 2, environment=environment)
    assert result.stats["blocking_copies"] > 0, "the memory is ordinary"
    timings = json.loads(times.read_text())
    assert layer_ms(timings, "plan_and_launch_ns") < latency_ms, "what it takes at least where the copy is waited for first"
    assert sum(layer_ms(timings, lap) for lap in ("plan_and_launch_ns", "cold_ns", "join_ns")) >= latency_ms, "in the end"


def test_graphs_are_captured_once(hot):
    """As CUDA would: again whenever the graph at an address is another one. There is one for each number of hits, and for
    several tokens one for each power of two."""
    steps = [decode(1 if i % 2 else 1 + i % 31, seed=i) for i in range(400)]
    environment = UNATTENDED | {"LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": 4}
    result = run(hot, [decode(1), greedy(30), *steps], {}, environment=environment, n_ctx=8192)
    sizes = 1 + (31 * N_USED - 1).bit_length()
    assert result.stats["mul_mat_id_graphs"] > 400
    assert N_LAYERS * N_USED <= result.stats["captures"] <= N_LAYERS * (N_USED + sizes)


def test_graphs_that_are_dropped_are_captured_again(hot):
    """A graph of a rare number of hits is not computed for seconds. Here none is kept at all."""
    result = run(hot, [decode(1), greedy(CALLS_BEFORE_FILL + 50)], {"capture_keep_ms": 0})
    assert result.hits > 0
    assert result.stats["captures"] > N_LAYERS * N_USED


def test_a_miss_that_is_copied_goes_through_page_locked_memory(hot):
    """Experts lie in the memory map; a copy from there would keep the token waiting."""
    model = generated("Q4_K")
    profile = hot.profile(model, PROFILE_STEPS)
    learning = Learning(hot)
    fake = {"pageable_blocks": 1, "host_buffer": 1, "fault_min_bytes": 32768}
    counts = []
    for n in (1, 4):
        steps = [decode(1), *[decode(1, seed=seed) for seed in range(50)] * n]
        result = learning.run(model, steps, profile, "copy", fake=fake)
        assert_same_answer(hot.probe.stock(model, steps), result)
        counts.append((result.stats["large_writes"], result.stats["blocking_copies"]))
    copied, blocking = (after - before for before, after in zip(*counts, strict=True))
    assert copied > 100
    # What the background reads back of its own few copies goes to ordinary memory.
    assert blocking < copied / 3, "as many as there were experts, of three tensors each"


PIECE, PIECES_IN_FLIGHT = 256 << 10, 2


def test_experts_are_copied_in_pieces(hot, tmp_path):
    """So that a token's rows do not wait behind a whole expert: each of its tensors has a MiB."""
    model = large_qwen3moe(tmp_path / "large.gguf", Sizes(n_expert=16, n_expert_used=2, n_ff=2048))
    steps = [decode(1), greedy(20)]
    profile = hot.probe.recording(model, steps).out_file
    ours = hot.run(model, steps, profile, slots=4)
    assert_same_answer(hot.probe.stock(model, steps), ours)
    assert ours.stats["largest_write"] == PIECE


def test_a_tokens_rows_wait_for_one_piece_at_most(hot, tmp_path):
    """Experts are swapped on a slow bus all the time: two pieces are under way at a time, of which the bus has one."""
    mbs = 1000
    model = large_qwen3moe(tmp_path / "large.gguf", Sizes(n_expert=16, n_expert_used=2, n_ff=2048))
    tokens = [decode(1, seed=seed) for seed in range(150)]
    steps = [decode(1), *tokens[:50], until("large_writes", 1), *tokens[50:]]
    profile = hot.probe.recording(model, [decode(1), greedy(20)]).out_file
    fake = {"bandwidth_mbs": mbs, "fault_min_bytes": PIECE}
    ours = Learning(hot).run(model, steps, profile, "cpu", fake=fake)
    assert_same_answer(hot.probe.stock(model, steps), ours)
    stats = ours.stats
    print({name: stats[name] for name in ("large_writes", "most_large_writes_queued", "longest_bus_wait_us")})
    assert stats["large_writes"] > 50
    assert 1 <= stats["most_large_writes_queued"] <= PIECES_IN_FLIGHT
    assert stats["longest_bus_wait_us"] <= PIECE / mbs


def waits_per_layer(hot, environment: dict, stats) -> float:
    """Of calls that keep their caller waiting, for a token's layer; llama.cpp's dense layers are on the device too."""
    counts = []
    for n in (40, 140):
        options = {**ON_DEVICE, "n_ctx": 1024}
        steps = [decode(1), greedy(n)]
        result = hot.probe.faking(generated("Q4_K"), steps, environment | {"FAKE_STATS": str(stats)}, **options)
        assert result.batches
        numbers = json.loads(stats.read_text())
        counts.append(numbers["waits"] + numbers["blocking_copies"])
    return (counts[1] - counts[0]) / 100 / N_LAYERS


STOCKS_WAITS_FOR_INPUTS = 4  # a wait and a copy for the rows, and for the ids


def test_inputs_are_waited_for_once(hot, tmp_path):
    """Stock waits for each input and then for its copy; ours asks for all of them and waits once."""
    cpu_moe = waits_per_layer(hot, fake_environment(), tmp_path / "stock")
    recording = fake_environment(plugin=PLUGIN, LLAMA_ARG_MOE_LAYER_PERF_OUT=tmp_path / "experts.json")
    ours = waits_per_layer(hot, recording, tmp_path / "ours")
    print(f"waits per layer: {cpu_moe} in stock with --cpu-moe, {ours} with the plugin")
    assert STOCKS_WAITS_FOR_INPUTS - (cpu_moe - ours) <= STOCKS_WAITS_FOR_INPUTS / 2
