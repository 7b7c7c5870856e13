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
ALL_SLOTS = 65535


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


def measure(args: argparse.Namespace) -> dict:
    if not (vulkan.FOLDER / "env").exists():
        sys.exit("bench: no Vulkan device here: run scripts/fetch-vulkan, which says why")
    model = args.model or paths.SHIPPED_MODEL
    print(f"vulkan: decode of {args.tokens} tokens, all runs of a round in turns", file=sys.stderr)
    command = [vulkan.BIN / "llama-bench", "-m", model, "-o", "json", "-p", 0, "-n", args.tokens]
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

        def decode(command: list, variables: dict) -> dict:
            return programs.speeds(programs.run(command, variables, folder)[0])

        in_round = {
            "stock": lambda: decode([*command, "-ot", f"exps={vulkan.DEVICE}"], vulkan.vulkan_environment()),
            "ours": lambda: decode(cpu_moe, vulkan.vulkan_environment(plugin=paths.PLUGIN, **hot)),
            "cpu_moe": lambda: decode(cpu_moe, vulkan.vulkan_environment()),
        }
        taken = in_turns(in_round, args.pairs)
    results = {"decode": ratio(taken, "ours", "stock", "decode"), "cpu": ratio(taken, "ours", "cpu_moe", "decode")}
    return {"model": model.name, "pairs": args.pairs, "tokens": args.tokens, "results": results}


def report(measured: dict) -> None:
    decode, cpu = (measured["results"][name] for name in ("decode", "cpu"))
    print(
        f"decode, all experts on {vulkan.DEVICE}, ours / stock: {shown(decode)}; {decode['ours_median']:.1f} and "
        f"{decode['stock_median']:.1f} t/s; stock with --cpu-moe {cpu['cpu_moe_median']:.1f} t/s; {measured['pairs']} rounds"
    )


def missed_bars(_: dict) -> list[str]:
    """None: there is nothing to compare with yet."""
    return []
