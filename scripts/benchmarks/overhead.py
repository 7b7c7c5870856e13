"""What the plugin costs. With nothing resident, against stock with --no-repack: decode and prompt speed in alternated
pairs, CPU only and with the dense layers on an RPC device, memory, and, where valgrind is installed, instructions. With
experts resident: what a layer call costs besides the computing (lanes)."""

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks import lanes, programs
from benchmarks.pairs import in_turns, ratio, shown

import paths

HELP = "the plugin with nothing resident against stock, and what launching and joining the lanes costs"
SECTIONS = ["cpu", "rpc", "instructions", "lanes"]
N_PROMPT = 512
MIB = 2**20
# median of the ratio at least, lower end of its interval at least
BARS = {"decode": (0.98, 0.96), "prompt": (0.99, 0.96)}
MAX_MEMORY_RATIO = 1.01
MAX_INSTRUCTION_RATIO = 1.01


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)


def paired(command: list, args: argparse.Namespace, folder: Path) -> dict:
    """Stock and plugin in turns, as ratios."""

    def stock() -> dict:
        output, memory = programs.run(command, programs.environment(), folder)
        return programs.speeds(output) | {"memory": memory}

    def plugin() -> dict:
        output, memory, _ = programs.run_recording(command, folder)
        return programs.speeds(output) | {"memory": memory}

    runs = in_turns({"stock": stock, "plugin": plugin}, args.pairs)
    return {what: ratio(runs, "plugin", "stock", what) for what in ("decode", "prompt", "memory")}


def instructions(model: Path, folder: Path) -> dict | None:
    """Instructions of a short decode on one thread, counted by callgrind; None without valgrind."""
    if not shutil.which("valgrind"):
        return None
    program = [paths.STOCK_BIN / "llama-completion", "-m", model, "-ngl", 0, "-t", 1, "-n", 16, "--cpu-moe", "--no-repack"]
    program += ["-no-cnv", "--temp", 0, "--no-warmup", "-p", "In the beginning"]
    log = folder / "callgrind.log"
    counted = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={log}", *program]

    def collected() -> int:
        return int(re.search(r"Collected : (\d+)", log.read_text())[1])

    programs.run(counted, programs.environment(), folder)
    stock = collected()
    programs.run_recording(counted, folder)
    plugin = collected()
    return {"stock": stock, "plugin": plugin, "ratio": plugin / stock, "command": programs.below_root(program)}


def measure(args: argparse.Namespace) -> dict:
    model = programs.bench_model(args.model)
    bench = [programs.LLAMA_BENCH, "-m", model, "-p", N_PROMPT, "-n", args.tokens, "-r", 1, "-o", "json"]
    bench += ["-ncmoe", 999, "--repack", 0, "-t", os.cpu_count()]
    results = {}
    measured = {"model": model.name, "pairs": args.pairs, "tokens": args.tokens, "results": results}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for placement in ("cpu", "rpc"):
            if placement not in args.sections:
                continue
            print(f"{placement}: decode of {args.tokens}, prompt of {N_PROMPT} tokens", file=sys.stderr)
            if placement == "cpu":
                results[placement] = paired([*bench, "-ngl", 0], args, folder)
            else:
                with programs.rpc_server(folder) as endpoint:
                    results[placement] = paired([*bench, "-ngl", 99, "-rpc", endpoint], args, folder)
        if "lanes" in args.sections:
            results["lanes"] = lanes.measure(model, args, folder)
        if "instructions" in args.sections:
            measured["instructions"] = instructions(model, folder)
    return measured


def placements(measured: dict) -> dict:
    return {name: results for name, results in measured["results"].items() if name != "lanes"}


def report(measured: dict) -> None:
    for placement, results in placements(measured).items():
        for what, r in results.items():
            unit, scale = ("MiB", MIB) if what == "memory" else ("t/s", 1)
            print(
                f"{placement:4} {what:7} plugin / stock: {shown(r)}; {r['plugin_median'] / scale:.1f} and "
                f"{r['stock_median'] / scale:.1f} {unit}, {measured['pairs']} pairs"
            )
    lanes.report(measured["results"].get("lanes", {}))
    if "instructions" in measured:
        counted = measured["instructions"]
        what = f"{counted['ratio']:.4f}" if counted else "valgrind is not installed"
        print(f"instructions, plugin / stock: {what}")


def missed_bars(measured: dict) -> list[str]:
    missed = []
    for placement, results in placements(measured).items():
        for what, (at_least, lower) in BARS.items():
            if results[what]["median_ratio"] < at_least or results[what]["interval"][0] < lower:
                missed.append(f"{placement} {what}: expected a median of {at_least} and an interval above {lower}")
        if results["memory"]["median_ratio"] > MAX_MEMORY_RATIO:
            missed.append(f"{placement} memory: expected at most {MAX_MEMORY_RATIO} of stock's")
    missed += lanes.missed_bars(measured["results"].get("lanes", {}))
    counted = measured.get("instructions")
    if counted and counted["ratio"] > MAX_INSTRUCTION_RATIO:
        missed.append(f"instructions: expected at most {MAX_INSTRUCTION_RATIO} of stock's")
    return missed
