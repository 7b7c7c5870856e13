"""What the plugin costs before the first token and beside it: the time of a whole run of one token, memory of the process, and
memory of the device (FakeDevice, which counts what is allocated). Stock, the plugin that nobody asks for anything, recording, and
with a cache of half of the experts, all in turns."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import programs
from benchmarks.pairs import in_turns, ratio, shown

import paths
from fake import fake_environment, read_stats

HELP = "time of a run of one token, memory of process and device, against stock"
MIB = 2**20
ARMS = ("inert", "recording", "cache")


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def measure(args: argparse.Namespace) -> dict:
    model = programs.bench_model(args.model)
    program = [paths.STOCK_BIN / "llama-completion", "-m", model, "--cpu-moe", "--no-repack", "-ngl", 99, "-t", 1, "-no-cnv"]
    program += ["--temp", 0, "-p", "a", "--no-warmup", "-c", 512, "--device", "FAKE0"]
    print("starts: all runs of a round in turns", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stats = folder / "stats.json"
        profile = folder / "experts.json"
        ours = {
            "stock": {},
            "inert": {},
            "recording": {"LLAMA_ARG_MOE_LAYER_PERF_OUT": folder / "recorded.json"},
            "cache": {
                "LLAMA_ARG_MOE_HOT_CACHE": profile,
                "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0,
                "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": max(1, half_of_experts(model) // MIB),
            },
        }

        def run(arm: str, n_tokens: int) -> dict:
            plugin = None if arm == "stock" else paths.PLUGIN
            loaded = fake_environment(host_buffer=1, plugin=plugin, stats=stats, **ours[arm])
            loaded = {key: value for key, value in loaded.items() if key.startswith(programs.NOT_INHERITED)}
            begin = time.monotonic()
            _, memory = programs.run([*program, "-n", n_tokens], programs.environment(**loaded), folder)
            return {"seconds": time.monotonic() - begin, "memory": memory, "device": read_stats(stats)["peak_bytes"]}

        ours["recording"]["LLAMA_ARG_MOE_LAYER_PERF_OUT"] = profile
        run("recording", args.tokens)
        ours["recording"]["LLAMA_ARG_MOE_LAYER_PERF_OUT"] = folder / "recorded.json"
        one = in_turns({arm: lambda arm=arm: run(arm, 1) for arm in ("stock", *ARMS)}, args.pairs)
        # The cache is filled after a few tokens.
        many = in_turns({arm: lambda arm=arm: run(arm, args.tokens) for arm in ("stock", "cache")}, 2)
    results = {arm: {what: ratio(one, arm, "stock", what) for what in ("seconds", "memory", "device")} for arm in ARMS}
    results["cache filled"] = {what: ratio(many, "cache", "stock", what) for what in ("memory", "device")}
    return {"model": model.name, "pairs": args.pairs, "tokens": args.tokens, "results": results}


def half_of_experts(model: Path) -> int:
    """Of the file's bytes: most of it is experts."""
    return model.stat().st_size // 2


def report(measured: dict) -> None:
    for arm, results in measured["results"].items():
        for what, r in results.items():
            unit, scale = ("s", 1) if what == "seconds" else ("MiB", MIB)
            names = [name for name in r if name.endswith("_median") and not name.startswith("stock")]
            print(
                f"{arm:12} {what:7} / stock: {shown(r)}; {r[names[0]] / scale:.2f} and {r['stock_median'] / scale:.2f} {unit}"
            )


def missed_bars(_: dict) -> list[str]:
    """None: there is nothing to compare with yet."""
    return []
