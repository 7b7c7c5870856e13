"""Adapters that come and go, request by request, while experts are resident: each answer is stock's for these adapters."""

import re

import pytest

import paths
from fake import fake_environment
from hot import ends, starts
from models import generated
from probe import decode
from processes import stock_environment, wait_for
from server import start
from ways_server import COMMON, ask

ADAPTERS = ["lora", "another-lora"]
BOTH, FIRST, SECOND, NONE = (1, 1), (1, 0), (0, 1), (0, 0)
ORDERS = {
    "both when the cache is filled": [BOTH, FIRST, SECOND, BOTH, NONE, SECOND, FIRST],
    "none when the cache is filled": [NONE, NONE, FIRST, SECOND, FIRST, BOTH, NONE],
}


def scales(active: tuple) -> list:
    return [{"id": id, "scale": scale} for id, scale in enumerate(active)]


def converse(server, order: list) -> list:
    return [ask(server, f"Text {active}: ", 24, lora=scales(active)).probabilities for active in order]


N_SCALES = 80  # each an FFN template of its own: more than a context remembers
LONG_PROMPT = "A text of more tokens than the plugin sees: " * 4  # a template first appears in a graph that is used again


@pytest.fixture(scope="module")
def command() -> list:
    adapters = ",".join(str(generated(name)) for name in ADAPTERS)
    return [paths.STOCK_BIN / "llama-server", "-m", generated("F16"), *COMMON, "-ngl", 0, "--cpu-moe", "--lora", adapters]


@pytest.mark.parametrize("learns", [False, True], ids=["fixed", "learning"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_request_has_the_answer_of_its_own_adapters(hot, command, tmp_path, order, learns):
    command = command + ([] if order.startswith("both") else ["--lora-init-without-apply"])
    with start(command, tmp_path, "stock", stock_environment()) as server:
        stock = converse(server, ORDERS[order])
        server.stop()
    assert stock[1] != stock[2]
    profile = hot.profile(generated("F16"), [decode(7), decode(9)])
    rate = {} if learns else {"LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0}
    environment = fake_environment(plugin=paths.PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=profile, MOE_HOT_TEST_FREE_COPIES=1, **rate)
    with start(command, tmp_path, "ours", environment) as server:
        first, *others = ORDERS[order]
        ours = converse(server, [first])
        wait_for("the cache is allocated", lambda: starts(server.log.read_text()))
        ours += converse(server, others)
        server.stop()
    log = (tmp_path / "ours.log").read_text()
    assert [n for n, (a, b) in enumerate(zip(stock, ours, strict=True)) if a != b] == []
    assert ends(log)[-1].hits > 0
    assert len(starts(log)) > 1 or order.startswith("both"), "adapters that came later are cached too"
    assert not re.search("hot cache off", log)


def test_a_server_whose_every_request_has_another_scale(hot, command, tmp_path):
    """What a context has forgotten of old scales is made anew, and never mistaken."""
    order = [(1 / (1 + n), 1.0) for n in range(N_SCALES)]
    with start(command, tmp_path, "stock", stock_environment()) as server:
        stock = [ask(server, LONG_PROMPT, 4, lora=scales(active)).probabilities for active in order]
        server.stop()
    profile = hot.profile(generated("F16"), [decode(7), decode(9)])
    environment = fake_environment(plugin=paths.PLUGIN, LLAMA_ARG_MOE_HOT_CACHE=profile, LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE=0)
    with start(command, tmp_path, "ours", environment) as server:
        ours = [ask(server, LONG_PROMPT, 4, lora=scales(active)).probabilities for active in order]
        server.stop()
    assert [n for n, (a, b) in enumerate(zip(stock, ours, strict=True)) if a != b] == []
    log = (tmp_path / "ours.log").read_text()
    assert "internal error" not in log
    assert ends(log)[-1].hits > 0
