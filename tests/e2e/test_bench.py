"""scripts/bench measures what it says: with few runs of a small model, where the figures themselves mean nothing."""

import json
import subprocess

import pytest

import paths
from models import generated
from processes import HANG_S, stock_environment

SHORT = ["--pairs", 2, "--tokens", 40]
# Few tokens, and a device that computes nothing changes what is asked for.
NEAR = 0.15
EXIT_CODES = (0, 1)  # 1: a bar is missed, as it may be here


def bench(tmp_path, *arguments) -> dict:
    file = tmp_path / "measured.json"
    command = [paths.REPOSITORY / "scripts/bench", *arguments, *SHORT, "--model", generated("Q4_K"), "--json", file]
    done = subprocess.run(
        [str(word) for word in command], env=stock_environment(), timeout=HANG_S, capture_output=True, text=True
    )
    assert done.returncode in EXIT_CODES and file.exists(), done.stderr[-2000:]
    measured = json.loads(file.read_text())
    assert measured["command"].startswith(f"scripts/bench {arguments[0]} ")
    assert measured["date"] and measured["machine"]["cores"] and measured["pairs"] == 2
    return measured["results"]


def assert_within_interval(measured: dict, middle: str = "median") -> None:
    low, high = measured["interval"]
    assert low <= measured[middle] <= high


def test_overhead_of_recording(tmp_path):
    results = bench(tmp_path, "overhead", "--sections", "cpu")
    assert results.keys() == {"cpu"}
    assert results["cpu"].keys() == {"decode", "prompt", "memory"}
    for ratio in results["cpu"].values():
        assert_within_interval(ratio, "median_ratio")
        assert ratio["plugin_median"] > 0 and ratio["stock_median"] > 0 and len(ratio["ratios"]) == 2


def test_overhead_of_the_lanes(tmp_path):
    lanes = bench(tmp_path, "overhead", "--sections", "lanes")["lanes"]
    assert lanes.keys() == {"25", "50", "100"}
    for share, measured in lanes.items():
        assert measured["hit_share"] == pytest.approx(int(share) / 100, abs=NEAR)
        assert measured["calls"] > 0
        for part in ("plan_and_launch_us", "join_us", "total_us"):
            assert measured[part]["median"] > 0
            assert_within_interval(measured[part])
        assert ("added_to_cold_us" in measured) == (share != "100")


def test_overlap(tmp_path):
    results = bench(tmp_path, "overlap")
    calls, decode, stock = (results[name] for name in ("calls", "decode", "stock_threads"))
    for ratio in (calls, decode, stock):
        assert_within_interval(ratio, "median_ratio")
    for ratio in (calls, decode):
        assert ratio["hit_share"] == pytest.approx(0.5, abs=NEAR)
    assert 0 < min(calls["latency_us"]) <= calls["delayed_median"]
    assert 0 < decode["expert_share"] <= 1 < decode["bound"]


def test_what_cannot_be_measured_is_refused(tmp_path):
    command = [paths.REPOSITORY / "scripts/bench", "overlap", "--pairs", "1"]
    done = subprocess.run(command, env=stock_environment(), timeout=HANG_S, capture_output=True, text=True)
    assert done.returncode == 2 and "at least 2" in done.stderr
