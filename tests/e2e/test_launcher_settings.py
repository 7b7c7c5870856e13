"""The launcher understands a command line as llama.cpp does: where experts are placed and which devices there are, over
configuration files, variables, the command line and a router's presets."""

import textwrap
from pathlib import Path

import pytest

from conftest import shipped_model
from launcher import BENCH_HELP, FIT_HELP, SERVER_HELP, launch, write_config, write_fake
from models import generated

RECORD = "--moe-layer-perf-out"
DEVICES = "Available devices:\n  RPC0: a server (8000 MiB, 6000 MiB free)"
ADDED = ["--cpu-moe"]


@pytest.fixture
def fake(tmp_path) -> Path:
    return write_fake(tmp_path / "llama-fake")


@pytest.fixture
def record(tmp_path) -> list:
    return [RECORD, tmp_path / "experts.json"]


# Arguments that place experts, whatever the model.
PLACEMENTS = [
    ["--cpu-moe"],
    ["-cmoe"],
    ["--cpu_moe"],
    ["-ncmoe", "2"],
    ["--n_cpu_moe", "2"],
    ["--n-cpu-moe", "2", "--n-cpu-moe", "0"],  # they add up
    ["-ot", "exps=CPU"],
    ["--override_tensor", r"blk\.[01]\.ffn_.*_exps=CUDA0"],
    ["-ot", "exps=CPU", "-ot", "token_embd=CPU"],
]
# Arguments that do not.
NO_PLACEMENTS = [
    ["--n-cpu-moe", "0"],
    ["-ot", "per_layer_token_embd.weight=CPU,token_embd.weight=CPU"],
    ["-ot", r"\.ffn_(up|down|gate)\.=CPU"],
    ["-ot", "exps.bias=CUDA0"],
    ["-otd", "exps=CPU", "-ncmoed", "4", "-cmoed"],  # the draft model's
    ["-p", "--cpu-moe"],
    ["-p", "-ot", "--prompt", "-ncmoe"],
]


def test_a_users_own_placement_is_kept(fake, record):
    for given in PLACEMENTS:
        assert launch(fake, *given, *record).started["args"] == given
    for given in NO_PLACEMENTS:
        assert launch(fake, *given, *record).started["args"] == [*given, *ADDED]


# name, value: whether experts are placed so. An empty number ends the program.
VARIABLES = [
    *[("LLAMA_ARG_CPU_MOE", value, True) for value in ("1", "on", "true", "enabled")],
    *[("LLAMA_ARG_CPU_MOE", value, False) for value in ("", "0", "off", "false", "disabled", "yes", "ON")],
    ("LLAMA_ARG_NO_CPU_MOE", "1", False),
    ("LLAMA_ARG_N_CPU_MOE", "2", True),
    ("LLAMA_ARG_N_CPU_MOE", "0", False),
    ("LLAMA_ARG_OVERRIDE_TENSOR", "exps=CPU", True),
    ("LLAMA_ARG_OVERRIDE_TENSOR", "token_embd=CPU", False),
    ("LLAMA_ARG_SPEC_DRAFT_CPU_MOE", "1", False),
]


@pytest.mark.parametrize(("name", "value", "places"), VARIABLES)
def test_variables_have_llama_cpps_own_truth_values(fake, record, name, value, places):
    assert launch(fake, *record, **{name: value}).started["args"] == ([] if places else ADDED)


def test_a_pattern_must_match_an_expert_tensor_of_this_model(fake, record):
    """The shipped model has six layers, so that layer 7 is none of its."""
    pattern = ["-ot", r"blk\.7\.ffn_.*_exps=CPU"]
    model = ["-m", str(shipped_model())]
    assert launch(fake, *model, *pattern, *record).started["args"] == [*model, *pattern, *ADDED]
    assert launch(fake, *pattern, *record).started["args"] == pattern, "a model that is not here may have it"
    first = generated("split")
    model = ["-m", str(first)]
    in_last_part = ["-ot", r"blk\.2\.ffn_down_exps=CPU"]
    assert launch(fake, *model, *in_last_part, *record).started["args"] == [*model, *in_last_part]


# a configuration file: whether it places experts
CONFIGS = [
    ("n-cpu-moe = 2", True),
    ("[*]\ncmoe = off ; a file's switch is on, whatever its value", True),
    ("ot = exps=CPU", True),
    ("LLAMA_ARG_CPU_MOE = 1", True),
    ("[default]\nncmoe=0", False),
    ("[a model]\nncmoe = 4", False),
    ("cpu_moe = 1", False),
    ("; ncmoe = 4\nrepack = off", False),
]


@pytest.mark.parametrize(("text", "places"), CONFIGS)
def test_configuration_files_count_as_they_do_for_llama_cpp(fake, record, tmp_path, text, places):
    assert launch(fake, *record, **write_config(tmp_path, text)).started["args"] == ([] if places else ADDED)


def test_a_configuration_file_may_be_below_the_home_folder(fake, record, tmp_path):
    (tmp_path / ".config").mkdir()
    write_config(tmp_path / ".config", "n-cpu-moe = 2")
    assert launch(fake, *record, XDG_CONFIG_HOME="", HOME=str(tmp_path)).started["args"] == []
    assert launch(fake, *record, XDG_CONFIG_HOME="/none", HOME=str(tmp_path)).started["args"] == ADDED


def test_llama_bench_reads_no_variables_and_its_values_are_tests(tmp_path, record):
    bench = write_fake(tmp_path / "bench", help_text=BENCH_HELP)
    shipped, elsewhere = ["-m", str(shipped_model())], ["-ot", r"blk\.7\.ffn_.*_exps=CPU"]
    config = write_config(tmp_path, "cpu-moe = 1")
    added = ["-ncmoe", "999"]
    for given, args in [
        ([], added),
        (["-ncmoe", "0"], added),  # would be a test of its own
        (["-ncmoe", "0,4"], ["-ncmoe", "0,4"]),
        (["--n_cpu_moe", "0-8+4"], ["--n_cpu_moe", "0-8+4"]),
        ([*shipped, *elsewhere], [*shipped, *elsewhere, *added]),
        ([*shipped, "-m", "other.gguf", *elsewhere], [*shipped, "-m", "other.gguf", *elsewhere]),
        (["-ot", "token_embd=CPU;exps=CPU"], ["-ot", "token_embd=CPU;exps=CPU"]),
        (["-ot", "token_embd=CPU;output=CPU,"], ["-ot", "token_embd=CPU;output=CPU,", *added]),
    ]:
        assert launch(bench, *given, *record, **config, LLAMA_ARG_CPU_MOE="1").started["args"] == args
    no_host = {
        value: launch(bench, "--no-host", value, *record).started["environment"].get("MOE_HOT_NO_HOST")
        for value in ("1", "0", "0,1")
    }
    assert no_host == {"1": "1", "0": None, "0,1": "1"}


def test_page_locked_memory_is_ruled_out_for_the_plugin_too(fake, record, tmp_path):
    def no_host(*args, **environment):
        return launch(fake, *args, *record, **environment).started["environment"].get("MOE_HOT_NO_HOST")

    assert no_host("--no-host") == no_host("--no_host") == no_host(**write_config(tmp_path, "no-host = 1")) == "1"
    assert no_host() == no_host("-p", "--no-host") == no_host(LLAMA_ARG_NO_HOST="0") is None


def test_placement_is_in_the_programs_own_words(tmp_path, record):
    other = write_fake(tmp_path / "other", help_text="usage: other model.gguf")
    assert launch(other, *record).started["args"] == []
    older = write_fake(tmp_path / "older", help_text=SERVER_HELP.replace("-cmoe, --cpu-moe ", "-x, --other "))
    assert launch(older, *record).started["args"] == ["-ncmoe", "999"]


def test_a_flag_without_its_value_is_left_to_the_program(fake, record):
    assert launch(fake, *record, "-m", "x", "--n-cpu-moe").started["args"] == ["-m", "x", "--n-cpu-moe"]


def test_every_server_is_asked_for_its_devices_in_llama_cpps_order(tmp_path):
    asked = tmp_path / "asked"
    fake = write_fake(tmp_path / "fake", help_text=FIT_HELP, devices=DEVICES, asked=asked)
    profile = tmp_path / "experts.json"
    profile.write_text('{"schema": "llama.cpp.moe_layer_perf.v1", "layers": [{"layer": 0, "experts": [[0, 1]]}]}')
    flags = ["--moe-hot-cache", profile, "--moe-hot-cache-device", "RPC0", "--fit", "off"]
    environment = write_config(tmp_path, "rpc = a:1") | {"LLAMA_ARG_RPC": "b:1,b:2", "LLAMA_ARG_OVERRIDE_TENSOR": "a=X"}
    assert launch(fake, *flags, "--rpc", "c:1", "-p", "--rpc", "--rpc", "d:1", **environment).code == 0
    questions = asked.read_text().splitlines()
    assert questions == ["--version", "--help", "--rpc|a:1|--rpc|b:1,b:2|--rpc|c:1|--rpc|d:1|--list-devices"]


@pytest.fixture
def router(tmp_path, record):
    """Starts a server in router mode with these presets."""
    server = write_fake(tmp_path / "server")

    def start(presets: str, *args):
        path = tmp_path / "presets.ini"
        path.write_text(textwrap.dedent(presets))
        answer = launch(server, "--models-preset", path, *args, *record)
        return answer.started["args"][2:], answer.err

    return start


def test_a_routers_models_are_placed_by_their_sections(router):
    assert router("[a]\nmodel = a.gguf\n[b]\nmodel = b.gguf\n") == (ADDED, "")
    assert router("[*]\nn-cpu-moe = 4\n[a]\nmodel = a.gguf\n") == ([], "")
    assert router("[a]\nm = a.gguf\ncpu-moe = off\n") == (ADDED, ""), "a preset's switch can be off"
    assert router("[a]\nm = a.gguf\nncmoe = 4\n", "-ncmoe", "0") == (["-ncmoe", "0", *ADDED], ""), "the router's own wins"
    assert router("[a]\nm = a.gguf\nncmoe = 4\n", "-m", "x") == (["-m", "x", *ADDED], ""), "not a router"


def test_presets_of_which_some_place_experts_are_left_alone_with_a_line(router):
    args, said = router("[a]\nm = a.gguf\nncmoe = 4\n[b]\nm = b.gguf\n[c]\nm = c.gguf\n")
    assert args == []
    (line,) = said.splitlines()
    assert line.startswith("moe-hot: ") and "cpu-moe = true in [b], [c]" in line
