"""llama-server as users run it, stock or through the launcher, and a client for it."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

import paths
from processes import HANG_S, free_port, process, stock_environment, wait_for

N_SEQUENCES = 4

# The warm-up is a batch of two tokens that no HTTP request accounts for.
COMMON_ARGUMENTS = ["--no-repack", "--no-warmup", "-t", 2, "-c", 8192, "-np", N_SEQUENCES]


@dataclass
class Answer:
    text: str
    n_prompt: int  # prompt tokens that were computed, not taken from the cache
    n_predicted: int

    @property
    def n_decoded(self) -> int:
        """Tokens computed after the prompt: the last one predicted is never fed back."""
        return self.n_predicted - 1


# Always as many tokens as asked for, each computed for this very request.
GREEDY = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}

# At its start llama-server decodes two tokens, one output, to learn whether the cache can be cut.
START_UP = Answer("", n_prompt=2, n_predicted=1)


class Server:
    def __init__(self, child: subprocess.Popen, port: int, log: Path):
        self.child = child
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.http = requests.Session()
        self.http.trust_env = False  # no proxy

    def healthy(self) -> bool:
        assert self.child.poll() is None, f"the server ended:\n{self.log.read_text(errors='replace')[-4000:]}"
        with contextlib.suppress(requests.ConnectionError):
            return self.http.get(f"{self.url}/health", timeout=HANG_S).status_code == 200
        return False

    def _post(self, path: str, body: dict, stream: bool = False) -> requests.Response:
        response = requests.Session()
        response.trust_env = False
        answer = response.post(f"{self.url}{path}", json=body, stream=stream, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        return answer

    def complete(self, prompt: str | list[int], n_predict: int) -> Answer:
        """Greedy, and without use of earlier requests' cache."""
        body = {"prompt": prompt, "n_predict": n_predict, **GREEDY}
        return self._answer(self._post("/completion", body).json())

    def complete_together(self, prompts: list[str], n_predict: int) -> list[Answer]:
        """One request, so that the sequences share the very same batches in every run."""
        body = {"prompt": prompts, "n_predict": n_predict, **GREEDY}
        answers = sorted(self._post("/completion", body).json(), key=lambda answer: answer["index"])
        return [self._answer(answer) for answer in answers]

    @staticmethod
    def _answer(answer: dict) -> Answer:
        return Answer(answer["content"], answer["timings"]["prompt_n"], answer["timings"]["predicted_n"])

    def chat_events(self, content: str, max_tokens: int) -> Iterator[dict]:
        """The events of a greedy streaming chat completion; closing the iterator closes the connection."""
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "stream": True,
            "timings_per_token": True,
            **GREEDY,
        }
        with self._post("/v1/chat/completions", body, stream=True) as response:
            for line in response.iter_lines():
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))

    def chat(self, content: str, max_tokens: int) -> Answer:
        text, timings = "", {}
        for event in self.chat_events(content, max_tokens):
            timings = event.get("timings", timings)
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
        return Answer(text, timings["prompt_n"], timings["predicted_n"])

    def busy_sequences(self) -> int:
        slots = self.http.get(f"{self.url}/slots", timeout=HANG_S).json()
        return sum(slot["is_processing"] for slot in slots)

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        """Asks the server to end, which it must do by itself, with exit code 0."""
        self.child.send_signal(signal_number)
        code = self.child.wait(timeout=HANG_S)
        assert code == 0, f"exit code {code}:\n{self.log.read_text(errors='replace')[-4000:]}"


@contextlib.contextmanager
def start(command: list, folder: Path, name: str, environment: dict[str, str]) -> Iterator[Server]:
    port = free_port()
    log = folder / f"{name}.log"
    with process([*command, "--host", "127.0.0.1", "--port", port], log, environment) as child:
        server = Server(child, port, log)
        wait_for(f"{name} is healthy", server.healthy)
        yield server


def stock_server(model: Path, folder: Path, *arguments):
    command = [paths.STOCK_BIN / "llama-server", "-m", model, *COMMON_ARGUMENTS, *arguments]
    return start(command, folder, "stock-server", stock_environment())


def recording_server(model: Path, folder: Path, out_file: Path):
    command = [paths.LAUNCHER, paths.to_launch("llama-server"), "-m", model, *COMMON_ARGUMENTS, "--moe-layer-perf-out", out_file]
    return start(command, folder, "recording-server", stock_environment())


def cached_server(model: Path, folder: Path, profile: Path, rpc_endpoint: str, *arguments):
    """With hot experts on an RPC server's device, as a user would start it, but that a cache which loses is not noticed."""
    cache = ["--moe-hot-cache", profile, "--moe-hot-cache-device", "RPC0"]
    command = [paths.LAUNCHER, paths.to_launch("llama-server"), "-m", model, *COMMON_ARGUMENTS, "--rpc", rpc_endpoint, *cache, *arguments]
    environment = stock_environment(MOE_HOT_TEST_NO_GUARD="1", MOE_HOT_TEST_WAIT="1")
    return start(command, folder, "cached-server", environment)
