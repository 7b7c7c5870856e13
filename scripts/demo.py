"""The main job, as a user would see it: an unmodified llama-server, started through moe-hot, answers a chat.

Prints the answer, the speeds, what each layer was asked for, and where the profile was written. Exits with 1 if
any of it fails.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "In the beginning God created the heaven and the earth. And"
START_SECONDS = 60
STOP_SECONDS = 30
HTTP = requests.Session()
HTTP.trust_env = False  # no proxy stands between us and 127.0.0.1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(server: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            if HTTP.get(f"{url}/health", timeout=1).ok:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.05)
    sys.exit(f"demo: llama-server did not get ready; its log:\n{log.read_text()}")


def chat(url: str, prompt: str, n_predict: int) -> dict:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": n_predict, "temperature": 0, "seed": 1}
    reply = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    reply.raise_for_status()
    return reply.json()


def stop(server: subprocess.Popen) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        sys.exit("demo: llama-server did not stop on SIGTERM")


def report(prompt: str, reply: dict, profile: Path) -> None:
    timings, recorded = reply["timings"], json.loads(profile.read_text())
    print(f"prompt   {prompt}")
    print(f"answer   {reply['choices'][0]['message']['content'].strip()}")
    print(f"prompt   {timings['prompt_n']} tokens at {timings['prompt_per_second']:.0f} tokens/s")
    print(f"decode   {timings['predicted_n']} tokens at {timings['predicted_per_second']:.0f} tokens/s")
    for layer in recorded["layers"]:
        busiest = max(layer["experts"], key=lambda pair: pair[1])
        print(
            f"layer {layer['layer']:2}  {layer['cold_slots_total']} (token, expert) requests, "
            f"{len(layer['experts'])} of {recorded['n_expert']} experts used, most: expert {busiest[0]}, {busiest[1]} times"
        )
    print(f"profile  {profile}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, default=ROOT / "tests/models/moe-small.gguf")
    parser.add_argument("-p", "--prompt", default=PROMPT)
    parser.add_argument("-n", "--predict", type=int, default=48)
    parser.add_argument("-o", "--profile", type=Path, default=ROOT / "build/demo/experts.json")
    args = parser.parse_args()
    args.profile.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [ROOT / "target/release/moe-hot", "llama-server", "-m", args.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--moe-layer-perf-out", args.profile, "-c", "2048", "--no-webui"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as server:
            try:
                wait_until_ready(server, url, log)
                reply = chat(url, args.prompt, args.predict)
            finally:
                stop(server)
    report(args.prompt, reply, args.profile)


if __name__ == "__main__":
    main()
