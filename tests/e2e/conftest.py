"""Fixtures: the models, a runner of moe-probe, an RPC server on loopback, llama-server with and without the plugin."""

import functools
import os
import shutil
from pathlib import Path

import pytest

import paths
from hot import Hot
from models import QUANTIZED, generated
from patched import COMPLETION, patched
from probe import Probe
from processes import free_port, listens, process, stock_environment, wait_for
from results import record_build, record_run

GENERATED = ["F16", *QUANTIZED]


def pytest_addoption(parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "full: runs with --full only")


def pytest_collection_modifyitems(config, items) -> None:
    if config.getoption("--full"):
        return
    deselected = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_terminal_summary(terminalreporter, config) -> None:
    here = Path(__file__).parent
    is_selection = config.option.keyword or [Path(arg).resolve() for arg in config.args] != [here]
    count = {word: len(terminalreporter.stats.get(word, [])) for word in ("passed", "failed", "error")}
    whole = config.getoption("--full") and not is_selection
    record_run(whole, count["passed"], count["failed"] + count["error"])
    files: dict[str, list[int]] = {}
    for word in count:
        for report in terminalreporter.stats.get(word, []):
            of_file = files.setdefault(Path(report.nodeid.split("::")[0]).stem, [0, 0])
            of_file[word != "passed"] += 1
    record_build(files)


def shipped_model() -> Path:
    if not paths.SHIPPED_MODEL.exists():
        message = f"{paths.SHIPPED_MODEL.relative_to(paths.REPOSITORY)} is not there yet"
        if os.environ.get("MOE_HOT_REQUIRE_MODEL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return paths.SHIPPED_MODEL


def find_model(name: str) -> Path:
    return shipped_model() if name == "shipped" else generated(name)


@pytest.fixture(params=["shipped", *GENERATED])
def model(request) -> Path:
    """The shipped model, and a generated one of each type."""
    return find_model(request.param)


@pytest.fixture(params=["shipped", "Q4_K"])
def model_of_two(request) -> Path:
    """The shipped model and one generated one, for tests where the type does not matter."""
    return find_model(request.param)


@pytest.fixture(scope="session")
def probe(tmp_path_factory) -> Probe:
    return Probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="session")
def hot(probe) -> Hot:
    return Hot(probe)


@pytest.fixture
def rpc_endpoint(tmp_path):
    """An ggml-rpc-server with a CPU device; it serves one client process at a time."""
    port = free_port()
    command = [paths.STOCK_BIN / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-d", "CPU", "-t", 1]
    with process(command, tmp_path / "rpc-server.log", stock_environment()):
        wait_for("the RPC server listens", functools.partial(listens, port))
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    """A profile of the shipped model, recorded by a patched program."""
    file = tmp_path_factory.mktemp("profile") / "experts.json"
    answer = patched("llama-completion", "-m", shipped_model(), *COMPLETION, "-n", 60, "--moe-layer-perf-out", file)
    assert answer.code == 0, answer.err
    return file


@pytest.fixture
def own_profile(recorded, tmp_path) -> Path:
    """The same as a file of the test's own."""
    return shutil.copy(recorded, tmp_path / "experts.json")


@pytest.fixture(params=["cpu", "rpc"])
def placement(request) -> dict:
    """Options of moe-probe: where the dense layers are. Experts stay on the CPU side."""
    if request.param == "cpu":
        return {}
    return {"rpc": request.getfixturevalue("rpc_endpoint"), "n_gpu_layers": 99}
