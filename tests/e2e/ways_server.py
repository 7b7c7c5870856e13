"""llama-server for the ways in: started with the plugin or without it, answers with their probabilities, states of a
router and of a server that sleeps."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

import paths
from processes import HANG_S, stock_environment, wait_for
from server import GREEDY, Server, start

COMMON = ["--no-repack", "--no-warmup", "-t", 2, "-c", 1024, "-np", 1]
N_PROBABILITIES = 4


@dataclass
class Answer:
    text: str
    probabilities: list  # of the likeliest tokens at every position, as printed with all their digits
    n_prompt: int
    n_predicted: int
    n_drafted: int
    n_accepted: int

    @property
    def n_decoded(self) -> int:
        """Tokens computed after the prompt: the last one predicted is never fed back."""
        return self.n_predicted - 1


@contextlib.contextmanager
def serve(folder: Path, arguments: list, out_file: Path | None = None) -> Iterator[Server]:
    """Stock, or through the launcher when a profile is wanted."""
    started = [paths.LAUNCHER, "llama-server", "--moe-layer-perf-out", out_file]
    command = started if out_file else [paths.STOCK_BIN / "llama-server"]
    name = "ours" if out_file else "stock"
    with start([*command, *COMMON, *arguments], folder, name, stock_environment()) as server:
        yield server


def request(server: Server, method: str, path: str, body: dict | None = None):
    """On a connection of its own: a router closes those that it keeps open whenever it likes."""
    with requests.Session() as session:
        session.trust_env = False  # no proxy
        response = session.request(method, f"{server.url}{path}", json=body, timeout=HANG_S)
    assert response.status_code == 200, response.text
    return response.json()


def post(server: Server, path: str, body: dict):
    return request(server, "POST", path, body)


def get(server: Server, path: str):
    return request(server, "GET", path)


def ask(server: Server, prompt: str, n_predict: int, **more) -> Answer:
    """Greedy, without use of earlier requests' cache; `model="name"` for a router."""
    body = {"prompt": prompt, "n_predict": n_predict, "n_probs": N_PROBABILITIES, **GREEDY, **more}
    answer = post(server, "/completion", body)
    timings = answer["timings"]
    return Answer(
        answer["content"],
        answer["completion_probabilities"],
        timings["prompt_n"],
        timings["predicted_n"],
        timings.get("draft_n", 0),
        timings.get("draft_n_accepted", 0),
    )


def wait_for_sleep(server: Server) -> None:
    wait_for("the server sleeps", lambda: get(server, "/props")["is_sleeping"])


def router_states(server: Server) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in get(server, "/models")["data"]}


def unload(server: Server, model: str) -> None:
    post(server, "/models/unload", {"model": model})
    wait_for(f"{model} is unloaded", lambda: router_states(server)[model] == "unloaded")
