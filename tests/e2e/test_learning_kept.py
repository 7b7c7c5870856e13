"""What a cache has learnt is kept in the `--moe-hot-cache` file: a profile like any other, always whole, never another
program's, and never at the price of the session."""

import fcntl
import json
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from experts_json import BATCH_CLASSES, as_counts
from fake import fake_environment, read_stats
from hot import complaints, ends, starts
from launcher import launch, write_fake
from learning import MISS, UPDATE_RATE
from models import generated
from paths import LAUNCHER, PLUGIN, PROBE
from probe import assert_same_answer, decode, greedy
from processes import HANG_S, process, wait_for
from server import COMMON_ARGUMENTS, start
from test_profile_schema import VALIDATOR

SLOTS, SPARE = 8, 1
N_LAYERS, N_EXPERT = 3, 16
HALF_LIFE_CALLS = 10_000
RECORDED = [decode(1), greedy(100)]
STEPS = [decode(1, seed=1), decode(7, seed=2), *[decode(1, seed=seed) for seed in range(3, 80)], greedy(60)]
LEARNS = {UPDATE_RATE: 1, MISS: "copy"}


def model() -> Path:
    return generated("Q4_K")


@pytest.fixture
def profile(hot, tmp_path) -> Path:
    """One's own copy of a profile that the session may write to."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    return Path(shutil.copy(hot.profile(model(), RECORDED), folder / "experts.json"))


def run(hot, profile: Path, **more):
    """With stock's answer, and a cache that has served."""
    result = hot.run(model(), STEPS, profile, SLOTS, environment=LEARNS | more)
    assert_same_answer(hot.probe.stock(model(), STEPS), result)
    assert result.hits > 0
    assert result.stats["allocated_bytes"] == 0
    return result


def only_file(profile: Path) -> None:
    assert [file.name for file in profile.parent.iterdir()] == [profile.name], "something is left beside it"


def assert_whole(profile: Path, program: Path) -> dict:
    raw = json.loads(profile.read_text())
    VALIDATOR.validate(raw)
    answer = launch(program, "-m", model(), "--moe-hot-cache", profile)
    assert answer.code == 0, answer.err
    return raw


def counts(raw: dict) -> dict[int, dict[int, int]]:
    return {layer["layer"]: as_counts(layer["experts"]) for layer in raw["layers"]}


def test_what_is_learnt_is_kept(hot, profile, tmp_path):
    """Ranks, residents, and the counts of this session beside those of the earlier one, which weigh a little less."""
    before, session = json.loads(profile.read_text()), tmp_path / "session.json"
    result = run(hot, profile, LLAMA_ARG_MOE_LAYER_PERF_OUT=session)
    assert result.complaints == []
    raw = assert_whole(profile, write_fake(tmp_path / "llama-fake"))
    only_file(profile)
    assert raw["model"] == before["model"]
    for layer in raw["moe_hot"]["layers"]:
        ranks = dict(layer["ranks"])
        assert len(ranks) == len(layer["ranks"]) <= N_EXPERT
        assert all(0 <= expert < N_EXPERT and 1 <= rank <= 65535 for expert, rank in ranks.items())
        assert len(set(ranks.values())) > 1
        residents = layer["resident"]
        assert residents == sorted(set(residents))
        assert 0 < len(residents) <= SLOTS - SPARE
        assert set(residents) <= set(range(N_EXPERT))
    earlier, now, merged = counts(before), counts(json.loads(session.read_text())), counts(raw)
    for layer in raw["layers"]:
        number, weight = layer["layer"], 0.5 ** (layer["calls"] / HALF_LIFE_CALLS)
        expected = dict(now[number])
        for expert, count in earlier[number].items():
            expected[expert] = expected.get(expert, 0) + round(count * weight)
        assert merged[number] == {expert: count for expert, count in expected.items() if count}
        assert sum(merged[number].values()) > sum(now[number].values()) > 0


def test_the_next_session_begins_with_those_who_were_resident(hot, profile):
    """So many copies, and a set that is not the profile's hottest."""
    run(hot, profile)
    first = {layer["layer"]: layer["resident"] for layer in json.loads(profile.read_text())["moe_hot"]["layers"]}
    still = hot.run(model(), RECORDED[:1] + [greedy(2)], profile, SLOTS, environment={UPDATE_RATE: 1, MISS: "cpu"})
    assert still.starts
    assert still.complaints == []
    after = {layer["layer"]: layer["resident"] for layer in json.loads(profile.read_text())["moe_hot"]["layers"]}
    kept = {layer: len(set(first[layer]) & set(after[layer])) for layer in first}
    assert all(n >= len(first[layer]) - 1 for layer, n in kept.items()), "one swap at most, in two calls"


def test_sessions_add_up(hot, profile, tmp_path):
    program, totals = write_fake(tmp_path / "llama-fake"), []
    for _ in range(3):
        run(hot, profile)
        totals.append(sum(sum(layer.values()) for layer in counts(assert_whole(profile, program)).values()))
    assert totals == sorted(set(totals))


def test_one_file_for_both_flags_keeps_both(hot, profile, tmp_path):
    """`--moe-hot-cache` and `--moe-layer-perf-out` may name the same file."""
    result = run(hot, profile, LLAMA_ARG_MOE_LAYER_PERF_OUT=profile)
    assert result.complaints == []
    raw = assert_whole(profile, write_fake(tmp_path / "llama-fake"))
    only_file(profile)
    assert all(layer["ranks"] and layer["resident"] for layer in raw["moe_hot"]["layers"])
    assert all(sum(layer[name]["calls"] for name in BATCH_CLASSES) > 0 for layer in raw["moe_hot"]["layers"])


def test_a_fixed_cache_leaves_the_file_as_it_is(hot, profile):
    before, stamp = profile.read_bytes(), profile.stat().st_mtime_ns
    run(hot, profile, **{UPDATE_RATE: 0})
    assert (profile.read_bytes(), profile.stat().st_mtime_ns) == (before, stamp)
    only_file(profile)


def test_another_programs_profile_is_not_touched(hot, profile):
    """It does not say whose it is."""
    raw = json.loads(profile.read_text())
    del raw["model"], raw["moe_hot"]
    profile.write_text(json.dumps(raw))
    before = profile.read_bytes()
    assert run(hot, profile).complaints == []
    assert profile.read_bytes() == before
    only_file(profile)


def test_a_profile_that_another_process_holds_is_not_touched(hot, profile):
    before = profile.read_bytes()
    with profile.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run(hot, profile)
        assert profile.read_bytes() == before
    only_file(profile)
    run(hot, profile)
    assert profile.read_bytes() != before, "let go, it is written"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
def test_a_folder_that_may_not_be_written_to_costs_what_is_learnt(hot, profile, tmp_path):
    """Even root is told no, without the privilege to pass over permissions."""
    before = profile.read_bytes()
    scenario = {"model": str(model()), "steps": STEPS}
    (tmp_path / "run.json").write_text(json.dumps(scenario))
    environment = fake_environment(
        plugin=PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=profile, MOE_HOT_TEST_SLOTS=SLOTS, stats=tmp_path / "stats", **LEARNS
    )
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-dac_override,-dac_read_search"]
    profile.chmod(0o444)
    profile.parent.chmod(0o555)
    try:
        command = [*without, PROBE, tmp_path / "run.json", tmp_path]
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=HANG_S)
    finally:
        profile.parent.chmod(0o755)
    assert done.returncode == 0, done.stderr[-2000:]
    (end,) = ends(done.stderr)
    assert end.hits > 0
    (line,) = complaints(done.stderr)
    assert "profile not saved" in line
    assert "Permission denied" in line
    assert profile.read_bytes() == before
    assert read_stats(tmp_path / "stats")["allocated_bytes"] == 0
    only_file(profile)


def test_a_process_that_is_killed_leaves_the_old_file_or_the_new_one(hot, profile, tmp_path):
    """At any moment around the end of its last context, when it writes."""
    program, before = write_fake(tmp_path / "llama-fake"), profile.read_bytes()
    (tmp_path / "run.json").write_text(json.dumps({"model": str(model()), "steps": STEPS}))
    environment = fake_environment(
        plugin=PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=profile, MOE_HOT_TEST_SLOTS=SLOTS, **LEARNS
    )
    chance = random.Random(1)
    n_whole = 0
    for _ in range(12):
        with process([PROBE, tmp_path / "run.json", tmp_path], tmp_path / "log", environment) as child:
            wait_for("the cache is there", lambda: starts((tmp_path / "log").read_text()) or child.poll() == 0)
            try:
                child.wait(chance.uniform(0, 0.3))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
            child.wait(HANG_S)
        n_whole += profile.read_bytes() != before
        assert_whole(profile, program)
    print(f"{n_whole} of 12 had been written to")


@pytest.mark.full
def test_a_server_writes_every_minute_and_a_kill_costs_no_more_than_that(hot, profile, tmp_path):
    before = profile.read_bytes()
    command = [LAUNCHER, "llama-server", "-m", model(), *COMMON_ARGUMENTS, "--moe-hot-cache", profile]
    environment = fake_environment(plugin=PLUGIN)
    with start(command, tmp_path, "server", environment) as server:

        def is_written() -> bool:
            server.complete([1, 2, 3], 8)
            return profile.read_bytes() != before

        wait_for("it is written", is_written)
        server.child.send_signal(signal.SIGKILL)
        server.child.wait(HANG_S)
    raw = assert_whole(profile, write_fake(tmp_path / "llama-fake"))
    assert all(layer["ranks"] and layer["resident"] for layer in raw["moe_hot"]["layers"])
    only_file(profile)
