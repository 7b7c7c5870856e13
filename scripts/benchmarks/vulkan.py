"""What our round trips cost on a real GPU backend: all experts on llama.cpp's Vulkan device, ours against stock.

The device is computed by the processor (scripts/fetch-vulkan), so that no speed here says anything about a GPU; the ratio
of two runs does, as far as it comes from what is launched, copied and waited for. Dense layers stay on the CPU, since their
kernels take minutes to compile for this device. One thread, as the device takes every core and the host spins as it waits."""

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks import programs
from benchmarks.pairs import in_turns, ratio, shown

import paths
import vulkan

HELP = "all experts on a Vulkan device, ours against stock"
N_THREADS = 1
# The first fills the cache.
REPETITIONS = 2
# More than what is ours: stock computes them, with experts from wherever they are.
PROMPT_TOKENS = 64
ALL_SLOTS = 65535


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def measure(args: argparse.Namespace) -> dict:
    if not (vulkan.FOLDER / "env").exists():
        sys.exit("bench: no Vulkan device here: run scripts/fetch-vulkan, which says why")
    model = args.model or paths.SHIPPED_MODEL
    print(f"vulkan: prompt of {PROMPT_TOKENS}, decode of {args.tokens} tokens, all runs of a round in turns", file=sys.stderr)
    command = [vulkan.BIN / "llama-bench", "-m", model, "-o", "json", "-p", PROMPT_TOKENS, "-n", args.tokens]
    command += ["-t", N_THREADS, "-ngl", 0, "--repack", 0, "-r", REPETITIONS]
    cpu_moe = [*command, "-ncmoe", 999]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs.run_recording(cpu_moe, folder)
        hot = {
            "LLAMA_ARG_MOE_HOT_CACHE": folder / "experts.json",
            "LLAMA_ARG_MOE_HOT_CACHE_DEVICE": vulkan.DEVICE,
            "LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE": 0,
            "MOE_HOT_TEST_SLOTS": ALL_SLOTS,
        }

        def timed(command: list, variables: dict) -> dict:
            return programs.speeds(programs.run(command, variables, folder)[0])

        in_round = {
            "stock": lambda: timed([*command, "-ot", f"exps={vulkan.DEVICE}"], vulkan.vulkan_environment()),
            "ours": lambda: timed(cpu_moe, vulkan.vulkan_environment(plugin=paths.PLUGIN, **hot)),
            "cpu_moe": lambda: timed(cpu_moe, vulkan.vulkan_environment()),
        }
        taken = in_turns(in_round, args.pairs)
    pairs = [("stock", "decode"), ("stock", "prompt"), ("cpu_moe", "decode"), ("cpu_moe", "prompt")]
    results = {f"{what} to {other}": ratio(taken, "ours", other, what) for other, what in pairs}
    return {"model": model.name, "pairs": args.pairs, "tokens": args.tokens, "results": results}


def report(measured: dict) -> None:
    print(f"all experts on {vulkan.DEVICE}, {measured['pairs']} rounds")
    for other, words in (("stock", "stock with experts there"), ("cpu_moe", "stock with --cpu-moe")):
        for what in ("decode", "prompt"):
            found = measured["results"][f"{what} to {other}"]
            speeds = f"{found['ours_median']:.1f} and {found[f'{other}_median']:.1f} t/s"
            print(f"{what:6}  ours / {words}: {shown(found)}; {speeds}")


def missed_bars(_: dict) -> list[str]:
    """None: there is nothing to compare with yet."""
    return []
