"""Every way in which a user places and loads experts: the same text and the same probabilities as stock, and the
plugin computed the layers that were left to the CPU, no more and no fewer."""

import pytest

from models import generated
from results import record_result
from ways import (
    N_LAYERS,
    N_ROWS,
    RPC_NAME,
    SHAPE,
    TYPE,
    Programs,
    Way,
    assert_computed,
    assert_equal,
    assert_same_answer,
    plugin_lines,
    small_model,
)
from ways_models import lazy_gemma4

EXPERTS = r"\.ffn_(up|down|gate)_exps"
LOAD_MODES = ["auto", "none", "mmap", "mlock", "mmap+mlock", "dio"]


def by_name(way: Way) -> str:
    return " ".join(map(str, way.arguments)) or way.name


def only_in_full(value):
    """What adds little to another case."""
    return pytest.param(value, marks=pytest.mark.full, id=by_name(value) if isinstance(value, Way) else value)


WITHOUT_DEVICE = [
    Way("--cpu-moe", ("--cpu-moe",)),
    Way("--n-cpu-moe", ("--n-cpu-moe", 1)),  # without a GPU every layer is the CPU's
    Way("-ot …=CPU", ("-ot", f"{EXPERTS}=CPU")),
    Way("-ot …=MoEHot", ("-ot", f"{EXPERTS}=MoEHot"), stock_arguments=("-ot", f"{EXPERTS}=CPU")),
    Way("-ngl 0", ("-ngl", 0), through_launcher=False),
    Way("--cpu-moe by environment", environment={"LLAMA_ARG_CPU_MOE": "1"}),
    Way("--no-host", ("--no-host",), through_launcher=False),
    Way("--numa distribute", ("--numa", "distribute")),
    *(Way(f"--load-mode {mode}", ("--load-mode", mode)) for mode in LOAD_MODES),
    *(only_in_full(Way(f"--numa {kind}", ("--numa", kind))) for kind in ("isolate", "numactl")),
    *(only_in_full(Way(f"--lazy-mode {mode}", ("--lazy-mode", mode))) for mode in ("on", "off")),
]

# All layers' dense parts are on the device.
WITH_RPC = [
    Way("--cpu-moe", ("--cpu-moe",)),
    Way("--n-cpu-moe", ("--n-cpu-moe", 1), layers=(0,)),
    Way("--n-cpu-moe", ("--n-cpu-moe", 2), layers=(0, 1)),
    Way("-ot …=CPU", ("-ot", f"{EXPERTS}=CPU")),
    Way("-ot …=CPU, one layer", ("-ot", rf"blk\.1{EXPERTS}=CPU"), layers=(1,)),
    Way(
        "-ot …=MoEHot",
        ("-ot", rf"blk\.[02]{EXPERTS}=MoEHot"),
        stock_arguments=("-ot", rf"blk\.[02]{EXPERTS}=CPU"),
        layers=(0, 2),
    ),
    Way("--no-host", ("--no-host", "--cpu-moe")),
    Way("--load-mode none", ("--load-mode", "none", "--cpu-moe")),
    Way("-ngl 1", ("-ngl", 1), through_launcher=False),  # the output layer alone
    Way("-ngl 2", ("-ngl", 2), through_launcher=False, layers=(0, 1)),
]


@pytest.fixture
def programs(tmp_path) -> Programs:
    return Programs(tmp_path, small_model())


@pytest.mark.parametrize("way", WITHOUT_DEVICE, ids=by_name)
def test_without_a_device(programs, way):
    assert_equal(programs, way)


def with_rpc(way: Way, endpoint: str) -> Way:
    device = ("--rpc", endpoint, *(() if "-ngl" in way.arguments else ("-ngl", 99)))
    stock = None if way.stock_arguments is None else (*way.stock_arguments, *device)
    return Way(
        f"{way.name}, {RPC_NAME}",
        (*way.arguments, *device),
        stock,
        way.through_launcher,
        way.layers,
        way.environment,
    )


@pytest.mark.parametrize("way", WITH_RPC, ids=by_name)
def test_with_dense_layers_on_rpc(programs, rpc_endpoint, way):
    ours = assert_equal(programs, with_rpc(way, rpc_endpoint))
    assert ours.buffers[f"RPC0[{rpc_endpoint}]"] > 0


def test_no_layer_on_a_device_that_is_there(programs, rpc_endpoint):
    """public-reports.md 9: a device, and none of the model on it."""
    way = Way("-ngl 0, with a device", ("-ngl", 0, "--rpc", rpc_endpoint), through_launcher=False)
    ours = assert_equal(programs, way)
    assert f"RPC0[{rpc_endpoint}]" not in ours.buffers


@pytest.mark.parametrize("load_mode", ["mmap", "none"])
def test_a_tensor_that_is_read_on_demand(tmp_path, load_mode):
    """`--lazy-mode on` maps the file for that tensor even where nothing else is memory-mapped."""
    way = Way(f"--lazy-mode on, --load-mode {load_mode}", ("--lazy-mode", "on", "--load-mode", load_mode))
    programs = Programs(tmp_path, lazy_gemma4(tmp_path / "lazy.gguf"))
    ours = assert_equal(programs, way, "gemma4", "F16", n_rows_of_last=N_ROWS)  # which needs all of the prompt here
    assert "tensor per_layer_token_embd.weight (size = 0 MiB) lazy read enabled" in ours.log


@pytest.mark.parametrize("load_mode", ["mmap", "none", *map(only_in_full, ["auto", "mlock", "mmap+mlock", "dio"])])
def test_a_split_file(tmp_path, load_mode):
    """Three files: with a memory map, one of our buffers per file."""
    way = Way(f"split GGUF, --load-mode {load_mode}", ("--load-mode", load_mode))
    assert_equal(Programs(tmp_path, generated("split")), way, SHAPE, "F16")


def test_our_buffer_named_without_recording(programs):
    """`-ot …=MoEHot` is obeyed: the plugin computes although nobody asked for a profile, and does not say otherwise."""
    ours_too, stock_only = (("-fit", "off", "-ot", f"{EXPERTS}={where}") for where in ("MoEHot", "CPU"))
    way = Way("-ot …=MoEHot", ours_too, stock_only)
    ours = programs.inert(way)
    assert_same_answer(programs.stock(way), ours)
    assert any(name.startswith("MoEHot") and size > 0 for name, size in ours.buffers.items())
    assert computing_backends(programs, way) >= {"MoEHot", "CPU"}
    assert not [line for line in plugin_lines(ours.log) if "experts stay with llama.cpp" in line]
    record_result(SHAPE, TYPE, "-ot …=MoEHot without recording", "equal")


def computing_backends(programs: Programs, way: Way) -> set[str]:
    """The backends in the scheduler's own list of splits."""
    debug = Way(way.name, (*way.arguments, "-lv", 5), environment={"GGML_SCHED_DEBUG": "1"})
    lines = [line for line in programs.inert(debug).log.splitlines() if line.startswith("## SPLIT")]
    return {line.split(":")[1].split("#")[0].strip() for line in lines}


def test_profiles_of_fewer_and_more_layers_replace_each_other(programs, rpc_endpoint, tmp_path):
    """The same model with another N of --n-cpu-moe is the same model."""
    out_file = tmp_path / "profiles" / "experts.json"
    out_file.parent.mkdir()
    for n in (2, 1, N_LAYERS):
        way = with_rpc(Way("--n-cpu-moe", ("--n-cpu-moe", n), layers=tuple(range(n))), rpc_endpoint)
        assert_computed(programs.recording(way, out_file), way.layers)
    assert {path.name for path in out_file.parent.iterdir()} == {out_file.name, f"perplexity-{out_file.name}"}
