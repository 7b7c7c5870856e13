"""One host copy (public-reports.md 16): with the plugin a server takes the memory that stock takes, memory-mapped and
not, and locks as much of it."""

import re
from pathlib import Path

import pytest

import paths
from models import generated
from processes import stock_environment
from results import record_result
from server import start
from ways import SHAPE, plugin_environment
from ways_models import large_qwen3moe
from ways_server import COMMON, ask

PROMPT = "The expert tensors of a layer stay where they are; what moves is the routing."
LARGEST_RATIO = 1.01
CODE_ALLOWANCE_MIB = 4  # the plugin's own pages, its counters and its scratch; a second copy would be 113 MiB
LEAST_MODEL_MIB = 100
LOCKED_TOLERANCE_MIB = 0.1  # parts of pages


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    path = large_qwen3moe(tmp_path_factory.mktemp("model") / "large.gguf")
    yield path
    path.unlink()


def status_mib(pid: int) -> dict[str, float]:
    """The sizes in /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text()
    return {name: int(kib) / 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", lines)}


def memory(model: Path, folder: Path, name: str, load_mode: str, environment: dict) -> tuple[str, dict[str, float]]:
    """The answer to a prompt below and one above the threshold, and what the server's memory is after them."""
    arguments = [*COMMON, "-m", model, "--cpu-moe", "--load-mode", load_mode]
    with start([paths.STOCK_BIN / "llama-server", *arguments], folder, name, environment) as server:
        text = ask(server, PROMPT[:20], 64).text + ask(server, PROMPT, 64).text
        sizes = status_mib(server.child.pid)
        server.stop()
    return text, sizes


def both(model: Path, folder: Path, load_mode: str) -> tuple[dict[str, float], dict[str, float]]:
    """Stock's sizes and ours, for the same answer, which the plugin computed."""
    profile = folder / "experts.json"
    stock_text, stock = memory(model, folder, "stock", load_mode, stock_environment())
    text, ours = memory(model, folder, "ours", load_mode, plugin_environment(profile))
    assert text == stock_text
    assert profile.exists()
    return stock, ours


@pytest.mark.parametrize("load_mode", ["mmap", "none"])
def test_one_host_copy(large_model, tmp_path, load_mode):
    stock, ours = both(large_model, tmp_path, load_mode)
    most = stock["VmHWM"] * LARGEST_RATIO + CODE_ALLOWANCE_MIB
    assert stock["VmHWM"] > LEAST_MODEL_MIB
    assert ours["VmHWM"] <= most
    assert ours["RssAnon"] <= stock["RssAnon"] * LARGEST_RATIO + CODE_ALLOWANCE_MIB
    record_result(SHAPE, "F16", f"one host copy, --load-mode {load_mode}", "equal")


@pytest.mark.parametrize("load_mode", ["mlock", "mmap+mlock"])
def test_as_much_is_locked(tmp_path, load_mode):
    """A small model: what an ordinary user may lock is not much."""
    stock, ours = both(generated("Q4_K"), tmp_path, load_mode)
    if stock["VmLck"] == 0:
        pytest.skip("this machine does not let us lock memory")
    assert ours["VmLck"] == pytest.approx(stock["VmLck"], abs=LOCKED_TOLERANCE_MIB)
