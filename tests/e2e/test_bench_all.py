"""scripts/bench all writes a file for each benchmark, each with its baseline. Figures mean nothing here."""

import json
import subprocess

import pytest

import paths
from processes import HANG_S, stock_environment

EXIT_CODES = (0, 1)  # 1: a bar is missed, as it may be here


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "all"
    command = [str(paths.REPOSITORY / "scripts/bench"), "all", "--quick", "--json", str(folder)]
    done = subprocess.run(command, env=stock_environment(), timeout=HANG_S, capture_output=True, text=True)
    assert done.returncode in EXIT_CODES and folder.is_dir(), done.stderr[-2000:]
    files = {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}
    assert all(file["command"].startswith("scripts/bench all") and file["machine"]["cores"] for file in files.values())
    return files


def test_there_is_a_file_for_each(measured):
    assert measured.keys() == {"overhead", "overlap", "starts", "profiles"}
    assert {"cpu", "rpc", "lanes"} <= measured["overhead"]["results"].keys()
    assert {"calls", "decode"} <= measured["overlap"]["results"].keys()


def test_starts_have_times_and_memory_beside_stocks(measured):
    results = measured["starts"]["results"]
    for arm in ("inert", "recording", "cache"):
        assert results[arm].keys() == {"seconds", "memory", "device"}
        assert all(ratio["stock_median"] > 0 and len(ratio["ratios"]) == 2 for ratio in results[arm].values())
    inert, filled = results["inert"]["device"], results["cache filled"]["device"]
    assert inert["median_ratio"] == 1, "a plugin that nobody asks for anything takes no memory of the device"
    assert filled["median_ratio"] > 1, "a cache does"


def test_profiles_are_timed_beside_a_start(measured):
    file = measured["profiles"]
    assert file["results"].keys() == {"read", "read twice and write"} and file["profile_bytes"] > 100_000
    assert all(ratio["start_median"] > 0 for ratio in file["results"].values())
    replay = file["replay"]
    hits = {policy: found["hit"] for policy, found in replay["policies"].items()}
    assert replay["lru_hit"] < hits["default"] < hits["belady"]
