"""The launcher and the hot-expert cache: its flags, whose profile it is, and the room that --fit leaves for it."""

import json
import os
from pathlib import Path

import pytest

from conftest import shipped_model
from launcher import BENCH_HELP, FIT_HELP, assert_refused, launch, write_config, write_fake
from models import generated
from probe import decode

CACHE = "--moe-hot-cache"
SCHEMA = "llama.cpp.moe_layer_perf.v1"
DEVICES = "Available devices:\n  CUDA0: a GPU (8) (8000 MiB, 6000 MiB free)\n  CUDA1: another (4000 MiB, 3000 MiB free)"


@pytest.fixture
def server(tmp_path) -> Path:
    """A program that fits and has two GPUs."""
    return write_fake(tmp_path / "llama-fake", help_text=FIT_HELP, devices=DEVICES)


def write_profile(path: Path, *layers: dict, **root) -> Path:
    layers = layers or ({"layer": 0, "experts": [[0, 1]]},)
    path.write_text(json.dumps({"schema": SCHEMA, **root, "layers": layers}))
    return path


@pytest.fixture
def profile(tmp_path) -> Path:
    return write_profile(tmp_path / "experts.json")


def test_flags_become_environment_and_win_over_it(server, profile):
    flags = [CACHE, profile, f"{CACHE}-max-mib", "-1", f"{CACHE}-auto-reserve-mib=5", f"{CACHE}-device", "CUDA1"]
    started = launch(server, *flags, "-c", "9", LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB="7").started
    ours = {name: value for name, value in started["environment"].items() if name.startswith("LLAMA_ARG_MOE")}
    assert ours == {
        "LLAMA_ARG_MOE_HOT_CACHE": str(profile),
        "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": "-1",
        "LLAMA_ARG_MOE_HOT_CACHE_AUTO_RESERVE_MIB": "5",
        "LLAMA_ARG_MOE_HOT_CACHE_DEVICE": "CUDA1",
    }
    assert started["args"][:3] == ["-c", "9", "--cpu-moe"]


def test_the_environment_is_checked_like_flags(server, profile):
    words = {"LLAMA_ARG_MOE_HOT_CACHE": str(profile)}
    answer = launch(server, **words, LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB="much")
    assert_refused(answer, "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB", '"much"', "expected a whole number")
    answer = launch(server, **words, LLAMA_ARG_MOE_HOT_CACHE_DEVICE="CUDA9")
    assert_refused(answer, '"CUDA9"', "CUDA0, CUDA1, CPU")
    answer = launch(server, LLAMA_ARG_MOE_HOT_CACHE="/nothing/here")
    assert_refused(answer, "/nothing/here", "no such file")


def test_a_size_in_the_environment_alone_changes_nothing(server):
    assert launch(server, "-m", "x", LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB="7").started["args"] == ["-m", "x"]


def test_a_cache_of_no_size_places_no_experts(server, profile):
    assert launch(server, CACHE, profile, f"{CACHE}-max-mib", "0").started["args"] == []


def test_one_file_may_be_read_and_written(server, profile):
    environment = launch(server, CACHE, profile, "--moe-layer-perf-out", profile).started["environment"]
    assert environment["LLAMA_ARG_MOE_HOT_CACHE"] == environment["LLAMA_ARG_MOE_LAYER_PERF_OUT"] == str(profile)


def test_an_unknown_device_is_refused_with_those_there_are(server, profile):
    assert_refused(launch(server, CACHE, profile, f"{CACHE}-device", "GPU"), '"GPU"', "expected one of CUDA0, CUDA1, CPU")
    assert launch(server, CACHE, profile, f"{CACHE}-device", "CPU").code == 0


def test_devices_of_an_rpc_server_count(profile, rpc_endpoint, tmp_path):
    flags = [CACHE, profile, f"{CACHE}-device"]
    config = write_config(tmp_path, f"rpc = {rpc_endpoint}")
    for args, environment in ((["--rpc", rpc_endpoint], {}), ([], {"LLAMA_ARG_RPC": rpc_endpoint}), ([], config)):
        assert "RPC0: " in launch("llama-completion", *args, "--list-devices", **environment).out, "stock reads it so"
        answer = launch("llama-completion", *flags, "CUDA0", *args, **environment)
        assert_refused(answer, "expected one of RPC0, CPU")
        assert launch("llama-completion", *flags, "RPC0", *args, "--version", **environment).code == 0


@pytest.fixture(params=["shipped", "F16", "Q4_K"])
def model(request) -> Path:
    return shipped_model() if request.param == "shipped" else generated(request.param)


def test_a_models_own_profile_is_taken_and_anothers_refused(server, probe, model, tmp_path):
    """The launcher finds the same fingerprints in the file as the plugin in memory."""
    profile = tmp_path / "recorded.json"
    probe.recording(model, [decode(5)], profile)
    assert launch(server, "-m", model, CACHE, profile).code == 0
    other = generated("F16", "granitemoe")
    answer = launch(server, "--model", other, CACHE, profile)
    assert_refused(answer, str(profile), "recorded from another model", str(other), "expected a profile")
    assert_refused(launch(server, CACHE, profile, LLAMA_ARG_MODEL=str(other)), str(other))


def test_a_model_in_parts_is_looked_through(server, probe, tmp_path):
    whole, first = generated("F16"), generated("split")
    profile = tmp_path / "recorded.json"
    probe.recording(first, [decode(5)], profile)
    assert launch(server, "-m", first, CACHE, profile).code == 0
    assert launch(server, "-m", whole, CACHE, profile).code == 0


# name: layers and root fields, and what the line must say.
OTHER_PROGRAMS = {
    "more layers": ([{"layer": 999, "experts": [[0, 1]]}], {}, "no experts in layer 999"),
    "more experts": ([{"layer": 0, "experts": [[4000, 1]]}], {}, "counts expert 4000"),
    "another number of experts": ([{"layer": 0, "experts": [[0, 1]]}], {"n_expert": 4096}, "not 4096"),
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_a_profile_without_fingerprints_must_have_the_models_layers_and_experts(server, tmp_path, name):
    layers, root, said = OTHER_PROGRAMS[name]
    profile = write_profile(tmp_path / "experts.json", *layers, **root)
    assert_refused(launch(server, "-m", generated("F16"), CACHE, profile), str(profile), said)


@pytest.mark.parametrize("content", [None, b"", b"no model", b"GGUF\x03\0\0\0"])
def test_a_model_that_cannot_be_read_is_left_to_the_program(server, profile, tmp_path, content):
    model = tmp_path / "model.gguf"
    if content is not None:
        model.write_bytes(content)
    assert launch(server, "-m", model, CACHE, profile).code == 0


def test_a_pipe_as_model_is_not_waited_for(server, profile, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert launch(server, "-m", tmp_path / "pipe", CACHE, profile).code == 0


# name: arguments, environment, and the --fit-target that the program gets. 6000 MiB are free on CUDA0.
FIT_TARGETS = {
    "a size, on top of the default": (["{}-max-mib", "500"], {}, "1524"),
    "automatic: half of what is free": ([], {}, "4024"),
    "automatic, on another device": (["{}-device", "CUDA1"], {}, "2524"),
    "the user's own target is raised": (["--fit-target", "100", "{}-max-mib", "500"], {}, "600"),
    "in the environment too": (["{}-max-mib", "500"], {"LLAMA_ARG_FIT_TARGET": "200"}, "700"),
    "with underscores, repeated, with a unit": (["--fit_target", "1", "-fitt", "9M", "{}-max-mib", "5"], {}, "14"),
    "the command line wins": (["-fitt", "3", "{}-max-mib", "5"], {"LLAMA_ARG_FIT_TARGET": "200"}, "8"),
    "a prompt is no target": (["-p", "-fitt", "{}-max-mib", "5"], {}, "1029"),
    "a list, at the device's place": (
        ["-fitt", "1,2", "-dev", "CUDA1,CUDA0", "{}-max-mib", "500", "{}-device", "CUDA0"],
        {},
        "1,502",
    ),
}


@pytest.mark.parametrize("name", FIT_TARGETS)
def test_fit_leaves_room_for_the_cache(server, profile, name):
    args, environment, target = FIT_TARGETS[name]
    started = launch(server, CACHE, profile, *(arg.format(CACHE) for arg in args), **environment).started
    assert started["args"][-2:] == ["--fit-target", target]
    assert sum("-fit" in arg for arg in started["args"]) == (2 if "-p" in args else 1)
    assert "LLAMA_ARG_FIT_TARGET" not in started["environment"]


@pytest.mark.parametrize("off", [["--fit", "off"], ["-fit", "0"], [f"{CACHE}-max-mib", "0"], [f"{CACHE}-device", "CPU"]])
def test_fit_is_left_alone_where_no_room_is_needed(server, profile, off):
    assert "--fit-target" not in launch(server, CACHE, profile, *off).started["args"]
    fit_off = launch(server, CACHE, profile, LLAMA_ARG_FIT="off").started
    assert "--fit-target" not in fit_off["args"]


def test_each_test_of_llama_bench_leaves_room(tmp_path, profile):
    bench = write_fake(tmp_path / "bench", help_text=BENCH_HELP, devices=DEVICES)
    flags = [CACHE, profile, f"{CACHE}-max-mib", "500", "-fitt", "1,2", "--fit_target", "3"]
    args = launch(bench, *flags, LLAMA_ARG_FIT_TARGET="9").started["args"]
    assert args == ["-ncmoe", "999", "--fit-target", "501,502,503"]


# how llama.cpp's own cache is given, and whether it is on
THEIR_CACHE = [
    (["--moe-cache-mib", "512"], {}, True),
    (["--moe_cache_mib", "512"], {}, True),
    ([], {"LLAMA_ARG_MOE_CACHE_MIB": "512"}, True),
    (["--moe-cache-mib", "512", "--moe-cache-mib", "0"], {}, False),
    ([], {"LLAMA_ARG_MOE_CACHE_MIB": "0"}, False),
]


@pytest.mark.parametrize(("args", "environment", "is_on"), THEIR_CACHE)
def test_two_caches_for_the_same_experts_are_refused(server, profile, args, environment, is_on):
    answer = launch(server, CACHE, profile, *args, **environment)
    if is_on:
        assert_refused(answer, "--moe-cache-mib", "LLAMA_ARG_MOE_CACHE_MIB", "512", f"expected either that or {CACHE}")
    else:
        assert answer.started["args"][: len(args)] == args
    assert launch(server, CACHE, profile, f"{CACHE}-max-mib", "0", *args, **environment).code == 0, "ours is off"
    assert launch(server, "--moe-layer-perf-out", profile, *args, **environment).code == 0, "a recording is no cache"


def test_room_is_no_more_than_the_experts_need(server, tmp_path):
    n_experts = max(1, generated("F16").stat().st_size // 2**20)
    profile = write_profile(tmp_path / "experts.json")
    target = int(launch(server, "-m", generated("F16"), CACHE, profile).started["args"][-1])
    assert 1024 < target <= 1024 + n_experts
