"""How much of a device the cache takes, when it takes nothing, and what it says: always stock's answer, and one line at
most that is not the start or the end of a cache that works."""

import json
import re
from math import ceil
from pathlib import Path

import pytest

from experts_json import Profile
from fake import FAKE_DEVICE
from hot import CALLS_BEFORE_FILL, HotResult, complaints, ends, starts
from models import generated
from paths import PLUGIN
from probe import assert_same_answer, decode, differ, greedy, until
from processes import stock_environment

MIB = 1 << 20
N_LAYERS, N_EXPERT = 3, 16
N_ALLOCATIONS = N_LAYERS + 1  # pools; a context's scratch memory
CAPACITY_MIB = 4096  # FakeDevice's, if nothing else is said
# The last tokens are enough for copies to be known to have arrived.
BEFORE, AFTER = [decode(1), greedy(20)], [decode(2), decode(7), decode(40), greedy(100)]
STEPS = BEFORE + AFTER
LARGE_WRITES = {"fault_min_bytes": 8192}
COPYING = [*BEFORE, until("large_writes", 12), *AFTER]
LARGE = [decode(40), decode(64), decode(33)]


def run(hot, profile=None, steps=STEPS, slots=None, device=None, fake=None, more=None, **options) -> HotResult:
    """With stock's answer. `options` in upper case are the cache's (MAX_MIB=2), others moe-probe's. No copy is waited for."""
    model = generated("Q4_K")
    cache = {name: options.pop(name) for name in list(options) if name.isupper()}
    environment = {f"LLAMA_ARG_MOE_HOT_CACHE_{name}": value for name, value in cache.items()} | (more or {})
    profile = profile or hot.profile(model, STEPS)
    ours = hot.run(model, steps, profile, slots, device, fake, environment, **options)
    assert_same_answer(hot.probe.stock(model, steps, **options), ours)
    assert all(line.startswith("moe-hot: ") for line in ours.complaints)
    return ours


def run_cached(hot, *arguments, fake: dict | None = None, **options) -> HotResult:
    """Waits for copies in the background to be made."""
    return run(hot, *arguments, steps=COPYING, fake=LARGE_WRITES | (fake or {}), **options)


def assert_cached(result: HotResult, budget_mib: float) -> None:
    assert result.complaints == []
    assert result.hits > 0
    peak = result.stats["peak_bytes"]
    assert 0 < peak <= budget_mib * MIB
    assert peak <= result.start.mib * MIB <= ceil(budget_mib) * MIB
    assert result.stats["allocated_bytes"] == 0


def assert_cold(result: HotResult, why: str) -> None:
    """One line says why, experts are with the plugin, and the device has nothing of them."""
    (line,) = result.complaints
    assert re.search(why, line), line
    assert result.starts == []
    assert result.hits == 0
    assert result.stats["allocations"] == 0
    assert "MoEHot model buffer" in result.log


def assert_inert(result: HotResult, why: str) -> None:
    """One line says why, and experts stay with llama.cpp."""
    (line,) = result.complaints
    assert line.startswith("moe-hot: inert: ")
    assert re.search(why, line), line
    assert "experts stay with llama.cpp" in line
    assert starts(result.log) == ends(result.log) == []
    assert "MoEHot model buffer" not in result.log


@pytest.fixture(scope="module")
def everything_mib(hot) -> int:
    """The smallest budget that holds all experts."""
    return ceil(run_cached(hot).stats["peak_bytes"] / MIB)


# How much


@pytest.mark.parametrize("slots", [None, N_EXPERT])
def test_no_budget_is_no_cache(hot, slots):
    assert_inert(run(hot, slots=slots, MAX_MIB=0), r"the hot cache is off \(--moe-hot-cache-max-mib 0\)")


@pytest.mark.parametrize("mib", [2, 3, 4])
def test_a_budget_for_some_experts_is_kept(hot, mib):
    result = run_cached(hot, MAX_MIB=mib)
    assert_cached(result, mib)
    assert 2 <= result.start.slots < N_EXPERT
    assert result.stats["peak_bytes"] > (mib - 1) * MIB, "the budget is used"


def test_a_larger_budget_has_more_slots(hot, everything_mib):
    slots = [run_cached(hot, MAX_MIB=mib).start.slots for mib in range(2, everything_mib + 1)]
    assert slots == sorted(set(slots))
    assert slots[-1] == N_EXPERT


@pytest.mark.parametrize("more", [0, 1, 50, 10**9])
def test_a_budget_for_all_experts_and_more(hot, everything_mib, more):
    result = run_cached(hot, MAX_MIB=everything_mib + more)
    assert_cached(result, everything_mib)
    assert (result.start.slots, result.start.expected) == (N_EXPERT, 100)
    assert result.stats["allocations"] == N_ALLOCATIONS


def test_the_automatic_budget_leaves_the_reserve(hot, everything_mib):
    assert_cached(run_cached(hot), CAPACITY_MIB - 1024)
    left = everything_mib - 2
    result = run_cached(hot, AUTO_RESERVE_MIB=CAPACITY_MIB - left)
    assert_cached(result, left)
    assert result.start.slots < N_EXPERT
    assert_cold(run(hot, AUTO_RESERVE_MIB=CAPACITY_MIB), "no room on FAKE0 for the contexts' scratch memory")
    assert_cold(run(hot, AUTO_RESERVE_MIB=10 * CAPACITY_MIB), "no room on FAKE0 for the contexts' scratch memory")


def test_fewer_slots_than_a_third_of_a_tokens_experts_are_no_cache(hot):
    assert_cold(run(hot, MAX_MIB=1), r"hold 1 slot per layer; expected at least 2 \(a third of 4 experts per token")


def test_a_budget_that_does_what_the_line_asks_for_is_enough(hot):
    (line,) = run(hot, MAX_MIB=1).complaints
    (needed,) = re.findall(r"experts per token, (\d+) MiB\)", line)
    assert_cached(run_cached(hot, MAX_MIB=int(needed)), int(needed))


def test_a_device_smaller_than_the_budget_has_a_smaller_cache(hot, everything_mib):
    result = run_cached(hot, fake={"capacity_mib": 3}, MAX_MIB=100)
    assert_cached(result, 3)
    assert result.start.slots < N_EXPERT
    assert result.start.slots == run_cached(hot, MAX_MIB=3).start.slots
    assert_cold(run(hot, fake={"capacity_mib": 1}, MAX_MIB=100), "hold 1 slot per layer")


@pytest.mark.parametrize("slots", [4, N_EXPERT])
def test_the_budget_holds_for_slots_that_a_test_asks_for(hot, slots):
    result = run(hot, slots=slots, MAX_MIB=2)
    assert_cached(result, 2)
    assert result.start.slots == min(slots, 4)


LATE = [decode(3, context=0), greedy(40, context=0), decode(3, context=1), greedy(20, context=1)]


@pytest.mark.parametrize("mib", [2, 4, 100])
def test_a_context_that_comes_later_stays_within_the_budget(hot, mib):
    """Its scratch memory was not planned for: without room it computes on the CPU, and says so."""
    result = run(hot, steps=LATE, slots=N_EXPERT, MAX_MIB=mib, contexts=2)
    assert result.hits > 0
    assert result.stats["peak_bytes"] <= mib * MIB
    assert len(result.complaints) <= 1
    assert all("no room on FAKE0 for a context's scratch memory" in line for line in result.complaints)
    assert result.complaints == [] or mib < 100


# Profiles


def other_model(hot) -> Path:
    return hot.profile(generated("F16", "granitemoe"), STEPS)


def edited(profile: Path, tmp_path: Path, edit) -> Path:
    raw = json.loads(profile.read_text())
    edit(raw)
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(raw))
    return file


def test_a_profile_of_another_model(hot):
    assert_cold(run(hot, other_model(hot)), "the profile was recorded from another model")


def without_model_and_with_n_expert(n_expert: int):
    """As other programs write it: without our own part, which knows the model."""

    def edit(raw: dict) -> None:
        del raw["model"], raw["moe_hot"]
        raw["n_expert"] = n_expert

    return edit


def test_a_profile_that_does_not_name_its_model_serves(hot, tmp_path):
    profile = edited(hot.profile(generated("Q4_K"), STEPS), tmp_path, without_model_and_with_n_expert(N_EXPERT))
    assert_cached(run_cached(hot, profile, MAX_MIB=3), 3)


@pytest.fixture
def with_more_experts(hot, tmp_path) -> HotResult:
    """With a profile that does not name its model and counts twice as many experts per layer."""

    def edit(raw: dict) -> None:
        del raw["model"]
        for part in (raw, *raw["moe_hot"]["layers"]):
            part["n_expert"] = 2 * N_EXPERT

    return run(hot, edited(hot.profile(generated("Q4_K"), STEPS), tmp_path, edit))


def test_a_profile_with_another_number_of_experts(hot, with_more_experts):
    other = hot.profile(generated("F16", "granitemoe"), [decode(3)])
    assert Profile.read(other).raw["n_expert"] != N_EXPERT
    assert_cold(run(hot, other), "recorded from another model")
    assert with_more_experts.hits == with_more_experts.stats["allocations"] == 0
    why = "the profile is of a model with 32 experts per layer, this one has 16"
    assert why in with_more_experts.complaints[0]


def test_a_profile_with_another_number_of_experts_is_told_in_one_line(with_more_experts):
    assert len(with_more_experts.complaints) == 1


def test_a_profile_that_is_not_there(hot, tmp_path):
    assert_cold(run(hot, tmp_path / "experts.json"), "experts.json: no such file")


@pytest.mark.parametrize(("text", "why"), [("{", "line 1"), ("{}", "schema"), ("", "empty"), ("\x00", "line 1|expected")])
def test_a_profile_that_cannot_be_read(hot, tmp_path, text, why):
    profile = tmp_path / "experts.json"
    profile.write_text(text)
    assert_cold(run(hot, profile), f"experts.json: .*({why})")


def test_a_profile_that_is_a_folder(hot, tmp_path):
    assert_cold(run(hot, tmp_path), "is a folder")


def test_a_layer_that_the_profile_lacks_has_slots_and_is_cold(hot, tmp_path):
    lacking = 1

    def without_layer(raw: dict) -> None:
        for part in (raw, raw["moe_hot"]):
            part["layers"] = [layer for layer in part["layers"] if layer["layer"] != lacking]

    profile, recorded = hot.profile(generated("Q4_K"), STEPS), tmp_path / "recorded.json"
    more = {"LLAMA_ARG_MOE_LAYER_PERF_OUT": recorded}
    result = run(hot, edited(profile, tmp_path, without_layer), slots=8, more=more)
    assert result.complaints == []
    assert (result.start.layers, result.stats["allocations"]) == (N_LAYERS, N_ALLOCATIONS)
    hits = {layer["layer"]: layer["hot_slots_total"] for layer in Profile.read(recorded, cached=True).raw["layers"]}
    assert [layer for layer, n in hits.items() if n == 0] == [lacking]


# When nothing is taken


def test_nothing_is_taken_before_there_is_something_to_serve(hot):
    """A cache is filled once a layer has been computed so often; other contexts and models need memory first."""
    result = run(hot, steps=[decode(1), greedy(CALLS_BEFORE_FILL - 2)], slots=N_EXPERT)
    assert result.stats["allocations"] == result.stats["instances"] == 0
    assert result.starts == result.complaints == []


def test_nothing_is_taken_for_large_batches(hot):
    result = run(hot, steps=LARGE, slots=N_EXPERT)
    assert result.stats["allocations"] == result.stats["instances"] == 0
    (line,) = result.complaints
    assert "only batches of more than 31 tokens were computed" in line


# Which device


def test_a_device_that_shares_the_hosts_memory_is_refused_unless_named(hot):
    refused = run(hot, fake={"integrated": 1})
    (line,) = refused.complaints
    assert line.startswith("moe-hot: inert: FAKE0 shares the host's memory")
    assert refused.stats["allocations"] == 0
    assert "MoEHot model buffer" not in refused.log
    assert_cached(run_cached(hot, fake={"integrated": 1}, device=FAKE_DEVICE, MAX_MIB=3), 3)


@pytest.mark.parametrize("name", ["FAKE1", "fake0", "FAKE0 ", "CUDA0"])
def test_an_unknown_device_is_answered_with_those_that_there_are(hot, name):
    assert_inert(run(hot, device=name), re.escape(f'no device is called "{name}"; expected one of CPU, FAKE0;'))


def test_the_plugins_own_device_cannot_be_named(hot):
    assert_inert(run(hot, device="MoEHot"), "MoEHot is no device that can hold experts")


def test_the_cpu_can_be_named(hot):
    """No gain, but a way to try the cache where there is no GPU. Nothing is taken from the GPU that there is."""
    result = run(hot, device="CPU", MAX_MIB=3)
    assert result.complaints == []
    assert result.start.device == "CPU"
    assert result.start.mib <= 3
    assert result.hits > 0
    assert result.stats["allocations"] == result.stats["instances"] == 0


def without_gpu(hot, repack: bool, **variables):
    """The plugin alone in a host that has no GPU."""
    environment = stock_environment(
        GGML_BACKEND_PATH=str(PLUGIN),
        LLAMA_ARG_MOE_HOT_CACHE=str(hot.profile(generated("Q4_K"), STEPS)),
        **{name: str(value) for name, value in variables.items()},
    )
    return hot.probe.faking(generated("Q4_K"), STEPS, environment, repack=repack)


def test_without_a_gpu_the_experts_stay_with_llama(hot):
    """Repacked, as stock has them."""
    result = without_gpu(hot, repack=True)
    (line,) = complaints(result.log)
    assert line.startswith("moe-hot: inert: no hot cache: no GPU with memory of its own was found")
    assert "--moe-hot-cache-device" in line
    assert "MoEHot model buffer" not in result.log
    repacked, plain = (hot.probe.stock(generated("Q4_K"), STEPS, repack=repack) for repack in (True, False))
    assert_same_answer(repacked, result)
    assert differ(plain, result)


def test_without_a_gpu_a_recording_goes_on(hot, tmp_path):
    out_file = tmp_path / "experts.json"
    result = without_gpu(hot, repack=False, LLAMA_ARG_MOE_LAYER_PERF_OUT=out_file)
    assert_same_answer(hot.probe.stock(generated("Q4_K"), STEPS, repack=False), result)
    recorded = Profile.read(out_file)
    assert recorded.layer_calls > 0
    lines = [line for line in result.log.splitlines() if "no hot cache: no GPU with memory of its own" in line]
    assert len(lines) == 1


def test_without_a_gpu_the_cpu_can_be_named(hot):
    result = without_gpu(hot, repack=False, LLAMA_ARG_MOE_HOT_CACHE_DEVICE="CPU", MOE_HOT_TEST_SLOTS=4)
    assert_same_answer(hot.probe.stock(generated("Q4_K"), STEPS, repack=False), result)
    (end,) = ends(result.log)
    assert end.hits > 0
