"""With the plugin loaded and nothing to win it takes nothing: stock's answer (repacking included), stock's buffers, and
one line of level INFO that says so, which llama.cpp shows with `-lv 4`."""

import re

import pytest

import paths
from models import generated
from processes import stock_environment
from results import record_result
from server import start
from ways import (
    SHAPE,
    Programs,
    Run,
    Way,
    assert_same_text,
    model_buffers,
    plugin_environment,
    plugin_lines,
    thread_names,
)

WAYS = [
    Way("nothing asked"),
    Way("nothing asked, --cpu-moe", ("--cpu-moe",)),
    Way("nothing asked, -ngl 0", ("-ngl", 0)),
    Way("nothing asked, --no-host", ("--no-host",)),
    Way("nothing asked, --load-mode none", ("--load-mode", "none")),
    Way("nothing asked, --fit off", ("--fit", "off")),
    Way("nothing asked, empty file name", environment={"LLAMA_ARG_MOE_LAYER_PERF_OUT": ""}),
]
WHY = "neither --moe-layer-perf-out nor --moe-hot-cache given"


def all_buffers(log: str) -> list[str]:
    """Every buffer that llama.cpp reports, with its size, in its order: weights, KV cache, computation."""
    return re.findall(r"I (\w+: +\S+ .*buffer size = .*)", log)


def schedule(log: str) -> list[str]:
    return re.findall(r"sched_reserve: graph.*", log)


def assert_stocks_own(stock: Run, ours: Run) -> None:
    assert_same_text(stock.text, ours.text)
    assert ours.log_probabilities == stock.log_probabilities
    assert all_buffers(ours.log) == all_buffers(stock.log) != []
    assert schedule(ours.log) == schedule(stock.log) != []


def inert_lines(log: str) -> list[str]:
    return [line for line in plugin_lines(log) if "moe-hot: inert: " in line]


@pytest.mark.parametrize("type_name", ["Q4_K", pytest.param("Q4_0", marks=pytest.mark.full), "F16"])
def test_stocks_answer_and_stocks_buffers(tmp_path, type_name):
    programs = Programs(tmp_path, generated(type_name), repack=True)
    stock, ours = programs.stock(WAYS[0]), programs.inert(WAYS[0])
    assert_stocks_own(stock, ours)
    repacked = "CPU_REPACK" in model_buffers(ours.log)
    assert repacked == (type_name != "F16"), "stock has no repacked kernels for F16"
    if repacked:
        plain = Programs(tmp_path, generated(type_name)).stock(WAYS[0])
        assert plain.log_probabilities != ours.log_probabilities, "repacked weights round otherwise"
    record_result(SHAPE, type_name, WAYS[0].name, "declined", WHY)


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.name)
def test_whatever_the_user_says_about_experts(tmp_path, way):
    programs = Programs(tmp_path, generated("Q4_K"), repack=True)
    assert_stocks_own(programs.stock(way), programs.inert(way))
    record_result(SHAPE, "Q4_K", way.name, "declined", WHY)


@pytest.mark.parametrize("placed", ["-ngl 99 --cpu-moe", "-ngl 0", "-ngl 99"])
def test_with_a_device(tmp_path, rpc_endpoint, placed):
    programs = Programs(tmp_path, generated("Q4_K"), repack=True)
    way = Way(f"nothing asked, {placed}, RPC device", (*placed.split(), "--rpc", rpc_endpoint))
    assert_stocks_own(programs.stock(way), programs.inert(way))
    record_result(SHAPE, "Q4_K", way.name, "declined", WHY)


@pytest.mark.parametrize("fit", ["off", "on"])
def test_one_line_says_so(tmp_path, fit):
    """With fit (llama.cpp's default) the first contexts only measure, and what is said meanwhile is not shown."""
    ours = Programs(tmp_path, generated("Q4_K")).inert(Way("", ("--fit", fit)))
    (line,) = inert_lines(ours.log)
    assert WHY in line
    assert plugin_lines(ours.log) == [line]


def test_nothing_is_said_unless_the_user_wants_to_read_more(tmp_path):
    ours = Programs(tmp_path, generated("Q4_K")).inert(Way("", ("-lv", 3, "--fit", "off")))
    assert ours.text
    assert plugin_lines(ours.log) == []


def test_one_line_in_a_server_with_two_models(tmp_path):
    """Two models, several contexts, one line; nothing is started or written."""
    arguments = ["-m", generated("Q4_K"), "-md", generated("F16"), "--spec-type", "draft-simple", "-lv", 5]
    folder = tmp_path / "server"
    folder.mkdir()
    command = [paths.STOCK_BIN / "llama-server", *arguments, "-t", 2, "-c", 512, "-np", 1]
    with start(command, folder, "inert", plugin_environment()) as server:
        assert server.complete("Once upon a", 20).text
        threads = thread_names(server.child.pid)
        server.stop()
    log = server.log.read_text(errors="replace")
    assert len(inert_lines(log)) == 1
    assert not any(name.startswith("moe-hot") for name in threads)
    assert {path.name for path in folder.iterdir()} == {"inert.log", "inert.log.out"}


def test_through_the_launcher_without_our_flags(tmp_path):
    """The launcher adds nothing to the command line either."""
    stock_command = [paths.STOCK_BIN / "llama-server"]
    arguments = ["-m", generated("Q4_K"), "-t", 2, "-c", 512, "-np", 1, "-lv", 4]
    logs = {}
    for name, command in (("stock", stock_command), ("ours", [paths.LAUNCHER, "llama-server"])):
        with start([*command, *arguments], tmp_path, name, stock_environment()) as server:
            answer = server.complete("Once upon a", 60)
            server.stop()
        logs[name] = (answer, all_buffers(server.log.read_text(errors="replace")))
    assert logs["ours"] == logs["stock"]
    assert "CPU_REPACK" in "".join(logs["ours"][1])
