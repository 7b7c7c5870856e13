"""The patched llama-server with a cache on FakeDevice, and a client for its endpoints."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import requests

import paths
from conftest import shipped_model
from fake import fake_environment
from processes import HANG_S
from server import GREEDY, Server, start

KEY = "a-secret"
# Of the shipped model; and the slots per layer that its cache is given, filled before the fourth batch.
N_LAYERS, N_EXPERT, SLOTS = 6, 32, 10


@contextlib.contextmanager
def serve(folder: Path, *arguments, environment: dict | None = None) -> Iterator[Server]:
    common = ["-t", 1, "-c", 2048, "-np", 2, "--no-warmup", "--metrics", "--fit", "off", "--no-repack"]
    command = [paths.PATCHED_BIN / "llama-server", *common, *arguments]
    environment = fake_environment(MOE_HOT_TEST_SLOTS=str(SLOTS)) if environment is None else environment
    with start(command, folder, "server", environment) as server:
        yield server


@contextlib.contextmanager
def serve_with_cache(folder: Path, profile: Path, *more, environment: dict | None = None) -> Iterator[Server]:
    model = ["-m", shipped_model(), "-ngl", 99, "--moe-hot-cache", profile]
    with serve(folder, *model, *more, environment=environment) as server:
        yield server


def call(server: Server, method: str, path: str, body=None, **headers: str) -> requests.Response:
    """On a connection of its own; a body that is text is sent as it is."""
    with requests.Session() as session:
        session.trust_env = False
        data = body if isinstance(body, (str, bytes)) or body is None else json.dumps(body)
        return session.request(method, f"{server.url}{path}", data=data, headers=headers, timeout=HANG_S)


def complete(server: Server, n: int, **more) -> dict:
    body = {"prompt": "The house", "n_predict": n, **GREEDY, **more}
    answer = call(server, "POST", "/completion", body)
    assert answer.status_code == 200, answer.text
    return answer.json()
