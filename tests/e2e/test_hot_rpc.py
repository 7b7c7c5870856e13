"""Real programs with hot experts on a device that is not the CPU: that of an RPC server, named with
`--moe-hot-cache-device`. Record first, use the profile afterwards, as a user would."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from hot import complaints, ends, starts
from processes import wait_for
from server import N_SEQUENCES, Answer, Server, cached_server, recording_server, stock_server

PROMPTS = ["Once upon a", "The king said", "def main", "x"]
LONG = "The expert tensors of a layer stay where they are; what moves is the routing. " * 4
N_WARM_UP = 24  # tokens; the cache is filled after a few
ON_CPU = ["-ngl", 0]
DENSE_ON_RPC = ["-ngl", 99, "--cpu-moe"]


def ask(server: Server) -> list[Answer]:
    answers = [server.complete(prompt, 40) for prompt in PROMPTS]
    return [*answers, server.complete(LONG, 24), server.chat(PROMPTS[0], 24)]


def wait_until_filled(server: Server) -> None:
    """The cache's start line stands in the log; its experts follow within a moment."""
    server.complete("warm", N_WARM_UP)
    wait_for("the cache is allocated", lambda: starts(server.log.read_text()))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The profile of a model, from a server that was asked what it will be asked again."""
    profiles = {}

    def profile_of(model):
        if model not in profiles:
            folder = tmp_path_factory.mktemp("recorded")
            with recording_server(model, folder, folder / "experts.json") as server:
                ask(server)
                server.stop()
            profiles[model] = folder / "experts.json"
        return profiles[model]

    return profile_of


@pytest.mark.parametrize("budget", [[], ["--moe-hot-cache-max-mib", 4]], ids=["automatic", "4 MiB"])
def test_the_text_is_stocks(model_of_two, tmp_path, rpc_endpoint, recorded, budget):
    with stock_server(model_of_two, tmp_path) as server:
        stock = ask(server)
    with cached_server(model_of_two, tmp_path, recorded(model_of_two), rpc_endpoint, *ON_CPU, *budget) as server:
        wait_until_filled(server)
        ours = ask(server)
        server.stop()
    assert ours == stock
    log = server.log.read_text()
    (start,), (end,) = starts(log), ends(log)
    assert start.device == "RPC0"
    assert end.hits > 0
    assert complaints(log) == []
    if budget:
        assert start.mib <= budget[1]
        assert start.slots < start.n_expert
    else:
        assert start.slots == start.n_expert


def test_four_sequences_in_every_batch(model_of_two, tmp_path, rpc_endpoint, recorded):
    """Of one request: four clients' batches depend on chance, and with them the rounding, also of stock."""

    def ask_for_four(server: Server) -> list[Answer]:
        return [*server.complete_together(PROMPTS, 40), *server.complete_together(PROMPTS, 12)]

    assert len(PROMPTS) == N_SEQUENCES
    with stock_server(model_of_two, tmp_path) as server:
        stock = ask_for_four(server)
    with cached_server(model_of_two, tmp_path, recorded(model_of_two), rpc_endpoint, *ON_CPU) as server:
        wait_until_filled(server)
        ours = ask_for_four(server)
        server.stop()
    assert ours == stock
    (end,) = ends(server.log.read_text())
    assert end.hits > 0


def test_four_clients_at_once(model_of_two, tmp_path, rpc_endpoint, recorded):
    with cached_server(model_of_two, tmp_path, recorded(model_of_two), rpc_endpoint, *ON_CPU) as server:
        wait_until_filled(server)
        with ThreadPoolExecutor(N_SEQUENCES) as clients:
            answers = list(clients.map(lambda prompt: server.complete(prompt, 40), PROMPTS * 3))
        server.stop()
    assert all(answer.n_predicted == 40 for answer in answers)
    (end,) = ends(server.log.read_text())
    assert end.hits > 0
    assert complaints(server.log.read_text()) == []


def test_dense_layers_on_the_same_rpc_server(model_of_two, tmp_path, rpc_endpoint, recorded):
    with stock_server(model_of_two, tmp_path, "--rpc", rpc_endpoint, *DENSE_ON_RPC) as server:
        stock = ask(server)
        server.stop()
    with cached_server(model_of_two, tmp_path, recorded(model_of_two), rpc_endpoint, *DENSE_ON_RPC) as server:
        wait_until_filled(server)
        ours = ask(server)
        server.stop()
    assert ours == stock
    (end,) = ends(server.log.read_text())
    assert end.hits > 0
