"""Runs llama.cpp's programs to their end, as a user has them: nothing of ours or of llama.cpp's in their environment but
what a run is given."""

import concurrent.futures
import contextlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT  # first: it is what makes the others importable

import paths
from models import generated
from processes import NOT_INHERITED, free_port, listens, process, wait_for

BENCH_MODEL = ("Q4_K", "qwen3moe-bench")
LLAMA_BENCH = paths.STOCK_BIN / "llama-bench"


def environment(**extra: str | int | Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NOT_INHERITED)}
    return clean | {name: str(value) for name, value in extra.items()}


def run(command: list, variables: dict[str, str], folder: Path) -> tuple[str, int]:
    """Runs a command to its end; returns its output and the most memory it had, in bytes."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(list(map(str, command)), stdout=output, stderr=errors, env=variables, cwd=folder)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if child.returncode != 0:
            sys.exit(f"bench: exit code {child.returncode}: {shlex.join(map(str, command))}\n{errors.read()[-2000:]}")
        return output.read(), usage.ru_maxrss * 1024


def run_recording(command: list, folder: Path) -> tuple[str, int, dict]:
    """The same with the plugin, which records; returns what it recorded too."""
    profile = folder / "experts.json"
    variables = environment(GGML_BACKEND_PATH=paths.PLUGIN, LLAMA_ARG_MOE_LAYER_PERF_OUT=profile)
    output, memory = run(command, variables, folder)
    recorded = json.loads(profile.read_text())
    if not recorded["summary"]["layer_calls"]:
        sys.exit("bench: the plugin computed nothing")
    return output, memory, recorded


def speeds(output: str) -> dict[str, float]:
    """Tokens per second of prompt and decode in llama-bench's output; of several repetitions, the last."""
    return {"prompt" if row["n_prompt"] else "decode": row["samples_ts"][-1] for row in json.loads(output)}


@contextlib.contextmanager
def rpc_server(folder: Path):
    port = free_port()
    command = [paths.STOCK_BIN / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-d", "CPU", "-t", os.cpu_count()]
    with process(command, folder / "rpc.log", environment()):
        wait_for("the RPC server listens", lambda: listens(port), timeout_s=20)
        yield f"127.0.0.1:{port}"


def below_root(command: list) -> str:
    """A command line with paths as seen from the repository's root."""
    return shlex.join(map(str, command)).replace(f"{ROOT}/", "")


def machine() -> dict:
    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


def bench_model(given: Path | None) -> Path:
    """The model to measure with. One that is generated is made in a process of its own: what this one has had in memory
    counts as its children's."""
    if given:
        return given.resolve()
    with concurrent.futures.ProcessPoolExecutor(max_workers=1) as maker:
        return maker.submit(generated, *BENCH_MODEL).result()
