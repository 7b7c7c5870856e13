"""A thread fills the cache while decoding goes on, as it does for users (no test switch). What is to happen during the
fill happens while FakeDevice holds its copies, and what is to happen after it waits for them: nothing depends on who is
faster, decoding or the fill."""

import json
import signal
from pathlib import Path

import pytest

import paths
from fake import fake_environment, read_stats
from hot import CALLS_BEFORE_FILL, HotResult, complaints, ends, starts
from models import generated
from paths import PLUGIN, SHIPPED_MODEL
from probe import assert_same_answer, decode, greedy, load, setting, threads, unload, until
from processes import run as run_program
from processes import wait_for
from server import COMMON_ARGUMENTS, start
from ways_models import large_qwen3moe

MIB = 1 << 20
N_LAYERS, N_EXPERT, N_USED, N_TENSORS = 3, 16, 4, 3
ALL_MIB = 5.0  # of experts, about
LARGE = {"fault_min_bytes": 32768}  # tensors of experts are larger, the rows of up to 7 tokens smaller
HELD = {"hold_writes": 1} | LARGE  # for less than 5 s, after which a copy counts as lost
SLOW = {"bandwidth_mbs": 2} | LARGE  # a fill takes more than 2.5 s
HOLD, LET_GO = setting("hold_writes", 1), setting("hold_writes", 0)
# Calls enough for a fill to be begun, and a wait for its first copy.
FILL_BEGINS = [decode(1), greedy(CALLS_BEFORE_FILL), until("large_writes", 1)]
N_WRITES = N_LAYERS * N_EXPERT * N_TENSORS
# Of all experts 8 at most are still under way.
FILLED = until("large_writes", N_WRITES)
SOME_FILLED = until("large_writes", 60)
WARM_UP = [decode(1), greedy(20)]


def model() -> Path:
    return generated("Q4_K")


def run(hot, steps, slots: int | None = None, fake: dict | None = None, **options) -> HotResult:
    profile = hot.profile(model(), [decode(1), greedy(100)])
    environment = {} if slots else {"MOE_HOT_TEST_WAIT": 0}
    ours = hot.run(model(), steps, profile, slots, fake=fake, environment=environment, **options)
    assert_same_answer(hot.probe.stock(model(), steps, **options), ours)
    return ours


def test_layers_that_come_after_the_first_prompts_are_cached_too(hot):
    """Of a prompt that is stock's only the last layer's experts are asked for, for the row that is put out."""
    prompts = [decode(40, outputs="last", seed=seed) for seed in range(CALLS_BEFORE_FILL + 1)]
    result = run(hot, [*prompts, greedy(30)], slots=N_EXPERT, n_ctx=512)
    assert result.complaints == []
    assert [start.layers for start in result.starts] == [1, N_LAYERS]
    assert result.hits > 20 * N_LAYERS * N_USED
    assert result.stats["allocated_bytes"] == 0


def test_decoding_goes_on_while_the_cache_is_filled(hot):
    """With no hits as long as nothing has arrived, then with some, then with most; and stock's answer at any time."""
    no_copy = [*FILL_BEGINS, greedy(30)]
    some = [LET_GO, SOME_FILLED, HOLD, greedy(30), LET_GO]
    all_copied = [FILLED, greedy(200)]
    stages = (no_copy + [LET_GO], no_copy + some, no_copy + some + all_copied)
    runs = [run(hot, steps, fake=HELD | {"bandwidth_mbs": 10}) for steps in stages]
    assert all(result.complaints == [] for result in runs)
    assert all(result.start.slots == N_EXPERT for result in runs)
    assert all(result.stats["allocated_bytes"] == 0 for result in runs)
    assert runs[0].hits == 0
    assert runs[0].end.misses == (1 + CALLS_BEFORE_FILL + 30) * N_LAYERS * N_USED
    rates = [result.end.hit_rate for result in runs]
    assert rates == sorted(set(rates))
    assert runs[-1].hits > runs[-1].end.misses


def test_a_fill_that_nothing_disturbs_is_whole(hot):
    result = run(hot, [*FILL_BEGINS, greedy(20), FILLED, greedy(200)], fake=LARGE)
    assert result.complaints == []
    assert result.stats["large_writes"] == N_WRITES
    assert result.hits > result.end.misses


def test_two_contexts_decode_during_the_fill(hot):
    """Before anything has arrived, and while experts arrive."""

    def at_once(seed: int) -> dict:
        in_second = [greedy(30, context=1), decode(20, context=1, seed=seed), greedy(30, context=1)]
        return threads([greedy(60, context=0)], in_second)

    begin = [decode(3, context=0), decode(5, context=1), greedy(CALLS_BEFORE_FILL, context=0), until("large_writes", 1)]
    steps = [*begin, at_once(1), LET_GO, SOME_FILLED, at_once(2), FILLED, greedy(20, context=0), greedy(20, context=1)]
    result = run(hot, steps, fake=HELD | {"bandwidth_mbs": 10}, contexts=2, n_threads=1)
    assert result.complaints == []
    assert result.hits > 0
    assert result.stats["allocated_bytes"] == 0


def test_a_model_that_is_unloaded_during_the_fill(hot):
    """With the last context ends the fill; the process goes on to load the model again."""
    result = run(hot, [*FILL_BEGINS, unload(), load(), *WARM_UP], fake=SLOW)
    assert result.starts
    assert result.complaints == []
    first, *_ = ends(result.log)
    assert first.copied_mib < ALL_MIB, "the fill was over"
    assert result.stats["allocated_bytes"] == 0


@pytest.mark.parametrize("other", ["F16", "Q4_K"])
def test_a_model_that_is_unloaded_during_the_fill_while_another_decodes(hot, other):
    """Nothing of the memory that is gone is copied: under the address of another model's experts, say."""
    in_other = [decode(1, context=1), greedy(20, context=1)]
    steps = [*in_other, *WARM_UP, until("large_writes", 1), unload(), *in_other, load(), *WARM_UP, *in_other]
    result = run(hot, steps, fake=SLOW, more_models=[str(generated(other))])
    assert result.starts
    assert len(result.complaints) == (other != "Q4_K")  # the profile is not that model's


def test_a_model_that_is_unloaded_while_its_cache_is_allocated(hot, tmp_path):
    """While another decodes, so that the fill is not waited for. Large pools take some time to be zeroed."""
    large = large_qwen3moe(tmp_path / "large.gguf")
    profile = hot.probe.recording(large, WARM_UP).out_file
    in_other = [decode(1, context=1), greedy(8, context=1)]
    steps = [*in_other, decode(1), greedy(CALLS_BEFORE_FILL - 1), unload(), *in_other]
    runs = [hot.run(large, steps, profile, more_models=[str(generated("F16"))]) for _ in range(3)]
    assert [result.stats["allocated_bytes"] for result in runs] == [0, 0, 0]


def test_a_model_that_comes_back_is_cached_again(hot):
    """llama-server unloads a model that nobody uses (--sleep-idle-seconds)."""
    steps = [*WARM_UP, unload(), load(), *WARM_UP]
    result = run(hot, steps, slots=N_EXPERT)
    assert result.complaints == []
    assert [start.layers for start in result.starts] == [N_LAYERS, N_LAYERS]
    before, after = ends(result.log)
    assert before.hits > 0
    assert after.hits > before.hits


@pytest.mark.parametrize(("mib", "n_cached"), [(4, 1), (10, 2), (100, 2)])
def test_two_models_share_a_budget(hot, mib, n_cached):
    """The first that computes takes what it can use; the second the rest, or nothing, and says so."""
    in_second = [decode(1, context=1), greedy(20, context=1)]
    if n_cached == 2:
        in_second.append(until("large_writes", N_WRITES + 30))
    steps = [*WARM_UP, SOME_FILLED, *in_second, greedy(100, context=1), greedy(100)]
    environment = {"LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": mib}
    profile = hot.profile(model(), [decode(1), greedy(100)])
    options = {"more_models": [str(model())]}
    result = hot.run(model(), steps, profile, fake=LARGE, environment=environment, **options)
    assert_same_answer(hot.probe.stock(model(), steps, **options), result)
    assert len(result.starts) == n_cached
    assert [end.hits > 0 for end in ends(result.log)] == [True, n_cached == 2]
    assert len(result.complaints) == 2 - n_cached
    assert result.stats["peak_bytes"] <= mib * MIB
    assert result.stats["allocated_bytes"] == 0


@pytest.mark.parametrize("load_mode", ["mmap", "none"])
@pytest.mark.parametrize("types", [("Q8_0", "Q4_K"), ("Q4_K", "Q8_0"), ("Q4_K", "Q4_K")], ids=["smaller", "larger", "the same"])
def test_the_model_that_was_loaded_first_is_cached_first(hot, tmp_path, types, load_mode):
    """Though its draft, whatever its size, decodes before it. The budget holds no more than one of them."""
    main, draft = map(generated, types)
    recorded = json.loads(hot.profile(main, [decode(1), greedy(100)]).read_text())
    del recorded["model"]
    profile = tmp_path / "experts.json"
    profile.write_text(json.dumps(recorded))
    of_draft = [decode(1, context=1), greedy(20, context=1)]
    steps = [decode(1), *of_draft, *WARM_UP, until("large_writes", 12), *of_draft, greedy(100)]
    options = {"more_models": [str(draft)], "load_mode": load_mode}
    environment = {"LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": 4}
    result = hot.run(main, steps, profile, fake=LARGE, environment=environment, **options)
    assert_same_answer(hot.probe.stock(main, steps, **options), result)
    assert [end.hits > 0 for end in ends(result.log)] == [True, False]
    (line,) = result.complaints
    assert "no hot cache" in line, "for the draft, once there is no room left"
    if load_mode == "mmap":
        name = f"{draft.name} #2" if draft == main else draft.name
        assert f"moe-hot: {name}: no hot cache" in line and f"moe-hot: {main.name}: hot cache on" in result.log


def shipped_profile(hot) -> Path:
    return hot.profile(SHIPPED_MODEL, [decode(1), greedy(100)])


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_during_the_fill_ends_cleanly(hot, tmp_path, signal_number):
    stats = tmp_path / "stats"
    environment = fake_environment(
        plugin=PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=shipped_profile(hot), stats=stats, bandwidth_mbs=1
    )
    command = [paths.STOCK_BIN / "llama-server", "-m", SHIPPED_MODEL, *COMMON_ARGUMENTS, "--cpu-moe", "-ngl", 0]
    with start(command, tmp_path, "server", environment) as server:
        answer = server.complete("Once upon a", 12)
        wait_for("the fill has begun", lambda: starts(server.log.read_text()))
        server.stop(signal_number)
    assert answer.n_predicted == 12
    log = server.log.read_text()
    (begin,), (end,) = starts(log), ends(log)
    assert end.copied_mib < begin.mib / 2, "the fill was waited for"
    assert complaints(log) == []
    assert read_stats(stats)["allocated_bytes"] == 0


def test_a_fill_goes_on_in_the_next_context(hot, tmp_path):
    """llama-bench makes a context for each of its tests and loads the model once."""
    environment = fake_environment(
        plugin=PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=shipped_profile(hot), bandwidth_mbs=10
    )
    command = [paths.STOCK_BIN / "llama-bench", "-m", SHIPPED_MODEL, "-ngl", 0, "-ncmoe", 999, "-r", 1, "-t", 2]
    run_program([*command, "-p", 0, "-n", "16,200", "-v"], tmp_path / "log", environment)
    first, *_, last = ends((tmp_path / "log").read_text())
    assert last.copied_mib > first.copied_mib
