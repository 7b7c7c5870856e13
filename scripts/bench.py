"""Measures moe-hot against stock llama.cpp. Needs scripts/setup to have run, and a machine that does nothing else.

`scripts/bench overhead --json FILE`: what the plugin costs with nothing resident (recording on), against stock with
--no-repack: decode and prompt speed in alternated pairs, CPU only and with the dense layers on an RPC device, memory,
and, where valgrind is installed, instructions. Exits with 1 if a bar is missed.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/e2e"), str(ROOT / "tests/generate")]

import paths  # noqa: E402
from models import generated  # noqa: E402
from processes import free_port, listens, process, wait_for  # noqa: E402

N_PROMPT, N_DECODE = 512, 128
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 1
RUN_TIMEOUT_S = 600
MIB = 2**20
# median of the ratio at least, lower end of its interval at least
BARS = {"decode": (0.98, 0.96), "prompt": (0.99, 0.96)}
MAX_MEMORY_RATIO = 1.01
MAX_INSTRUCTION_RATIO = 1.01


def environment(plugin: bool, profile: Path) -> dict[str, str]:
    """As a user has it: nothing of ours or of llama.cpp's set, but what loads the plugin and makes it record."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GGML_", "LLAMA_", "MOE_HOT_"))}
    ours = {"GGML_BACKEND_PATH": str(paths.PLUGIN), "LLAMA_ARG_MOE_LAYER_PERF_OUT": str(profile)}
    return clean | (ours if plugin else {})


def run(command: list, plugin: bool, folder: Path) -> tuple[str, int]:
    """Runs a command to its end; returns its output and the most memory it had, in bytes."""
    profile = folder / "experts.json"
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=errors, env=environment(plugin, profile), cwd=folder
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if child.returncode != 0:
            sys.exit(f"bench: exit code {child.returncode}: {shlex.join(map(str, command))}\n{errors.read()[-2000:]}")
        if plugin and not json.loads(profile.read_text())["summary"]["layer_calls"]:
            sys.exit("bench: the plugin computed nothing")
        return output.read(), usage.ru_maxrss * 1024


def speeds(command: list, plugin: bool, folder: Path) -> dict[str, float]:
    """Tokens per second of prompt and decode, and memory in bytes, of one llama-bench run."""
    output, memory = run(command, plugin, folder)
    rows = json.loads(output)
    measured = {"prompt" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}
    return measured | {"memory": memory}


@contextlib.contextmanager
def rpc_server(folder: Path):
    port = free_port()
    command = [paths.STOCK_BIN / "ggml-rpc-server", "-H", "127.0.0.1", "-p", port, "-d", "CPU", "-t", os.cpu_count()]
    with process(command, folder / "rpc.log", environment(False, folder)):
        wait_for("the RPC server listens", lambda: listens(port), timeout_s=20)
        yield f"127.0.0.1:{port}"


def paired(command: list, pairs: int, folder: Path) -> dict[str, list[dict]]:
    """Stock and plugin in turns; which one goes first alternates too."""
    runs: dict[str, list[dict]] = {"stock": [], "plugin": []}
    for pair in range(pairs):
        for name in ("stock", "plugin") if pair % 2 == 0 else ("plugin", "stock"):
            runs[name].append(speeds(command, name == "plugin", folder))
        print(f"\r{pair + 1} of {pairs} pairs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


def ratio(runs: dict[str, list[dict]], what: str) -> dict:
    """Plugin over stock, pair by pair: the median and its bootstrapped interval."""
    stock, plugin = ([run[what] for run in runs[name]] for name in ("stock", "plugin"))
    ratios = np.array(plugin) / np.array(stock)
    spread = stats.bootstrap(
        (ratios,), np.median, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(BOOTSTRAP_SEED)
    )
    low, high = spread.confidence_interval
    return {
        "median_ratio": float(np.median(ratios)),
        "interval": [float(low), float(high)],
        "stock_median": float(np.median(stock)),
        "plugin_median": float(np.median(plugin)),
        "ratios": ratios.tolist(),
    }


def instructions(model: Path, folder: Path) -> dict | None:
    """Instructions of a short decode on one thread, counted by callgrind; None without valgrind."""
    if not shutil.which("valgrind"):
        return None
    program = [paths.STOCK_BIN / "llama-completion", "-m", model, "-ngl", 0, "-t", 1, "-n", 16, "--cpu-moe", "--no-repack"]
    program += ["-no-cnv", "--temp", 0, "--no-warmup", "-p", "In the beginning"]
    counts = {}
    for name in ("stock", "plugin"):
        log = folder / "callgrind.log"
        callgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={log}"]
        run([*callgrind, *program], name == "plugin", folder)
        counts[name] = int(re.search(r"Collected : (\d+)", log.read_text())[1])
    return counts | {"ratio": counts["plugin"] / counts["stock"], "command": below_root(program)}


def below_root(command: list) -> str:
    """A command line with paths as seen from the repository's root."""
    return shlex.join(map(str, command)).replace(f"{ROOT}/", "")


def machine() -> dict:
    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.platform()}


def made_elsewhere(variant: str, architecture: str) -> Path:
    """A generated model, made in a process of its own: what this one has had in memory counts as its children's."""
    with concurrent.futures.ProcessPoolExecutor(max_workers=1) as maker:
        return maker.submit(generated, variant, architecture).result()


def overhead(args: argparse.Namespace) -> dict:
    model = args.model or made_elsewhere("Q4_K", "qwen3moe-bench")
    bench = [paths.STOCK_BIN / "llama-bench", "-m", model, "-p", N_PROMPT, "-n", N_DECODE, "-r", 1, "-o", "json"]
    bench += ["-ncmoe", 999, "--repack", 0, "-t", os.cpu_count()]
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for placement in args.placements:
            print(f"{placement}: decode of {N_DECODE}, prompt of {N_PROMPT} tokens", file=sys.stderr)
            if placement == "cpu":
                runs = paired([*bench, "-ngl", 0], args.pairs, folder)
            else:
                with rpc_server(folder) as endpoint:
                    runs = paired([*bench, "-ngl", 99, "-rpc", endpoint], args.pairs, folder)
            results[placement] = {what: ratio(runs, what) for what in ("decode", "prompt", "memory")}
        counted = instructions(model, folder)
    return {"model": model.name, "pairs": args.pairs, "results": results, "instructions": counted}


def report(measured: dict) -> None:
    for placement, results in measured["results"].items():
        for what, r in results.items():
            unit, scale = ("MiB", MIB) if what == "memory" else ("t/s", 1)
            print(
                f"{placement:4} {what:7} plugin / stock: median {r['median_ratio']:.3f}, 95 % interval "
                f"{r['interval'][0]:.3f} to {r['interval'][1]:.3f}; {r['plugin_median'] / scale:.1f} and "
                f"{r['stock_median'] / scale:.1f} {unit}, {measured['pairs']} pairs"
            )
    counted = measured["instructions"]
    print(f"instructions, plugin / stock: {counted['ratio']:.4f}" if counted else "instructions: valgrind is not installed")


def missed_bars(measured: dict) -> list[str]:
    missed = []
    for placement, results in measured["results"].items():
        for what, (median, lower) in BARS.items():
            if results[what]["median_ratio"] < median or results[what]["interval"][0] < lower:
                missed.append(f"{placement} {what}: expected a median of {median} and an interval above {lower}")
        if results["memory"]["median_ratio"] > MAX_MEMORY_RATIO:
            missed.append(f"{placement} memory: expected at most {MAX_MEMORY_RATIO} of stock's")
    counted = measured["instructions"]
    if counted and counted["ratio"] > MAX_INSTRUCTION_RATIO:
        missed.append(f"instructions: expected at most {MAX_INSTRUCTION_RATIO} of stock's")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    command = commands.add_parser("overhead", help="the plugin with nothing resident against stock")
    command.add_argument("--json", type=Path, help="write everything measured to this file")
    command.add_argument("--pairs", type=int, default=30)
    command.add_argument("--model", type=Path, help="instead of the generated one")
    command.add_argument("--placements", nargs="+", choices=["cpu", "rpc"], default=["cpu", "rpc"])
    command.set_defaults(measure=overhead)
    args = parser.parse_args()
    measured = {
        "command": shlex.join(["scripts/bench", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        **args.measure(args),
    }
    report(measured)
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    missed = missed_bars(measured)
    print("\n".join(missed) if missed else "all bars are met")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
