"""Speeds by llama-bench, always paired: what is compared runs in turns, and ratios are taken round by round.

`tune` finds the threads with which stock is fastest. `overhead`: the plugin recording, nothing resident, against stock.
`layers`: where a layer's time goes with experts resident. `cache`: the cache against whole layers on the GPU (--n-cpu-moe) in the
same memory. `prompts`: prompts with a filled cache against stock."""

import json
import os
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from device.budget import Budget, Skipped
from device.folder import BIN, PLUGIN, Failed, Programs
from device.models import Sizes

MIB = 1 << 20
SHARES = (0.25, 0.5, 0.75, 1.0)
# Measured first, and against --cpu-moe too.
TELLING = 0.5
CPU_MOE = ["-ncmoe", 999]
LEAST_ROUNDS, MOST_ROUNDS = 2, 10
# Of a run with a cache the first fills it.
REPETITIONS = 2
N_PROMPT = 512
N_DECODE = 128
TUNING_TOKENS = 32
# What is hoped for (decode at half of the experts, against whole layers; prompts, against stock). Missed bars are said beside
# the figures; they are no failure of this machine.
LEAST_DECODE, LEAST_PROMPT = 1.2, 0.98
# A cache with fewer hits than this was held back or given up (src/cache/guard.rs), whatever the speed. So was one that says so.
LEAST_HITS_PERCENT = 5
OFF = re.compile(r"hot cache (?:of this model )?off|no hot cache|hot cache not used for batches")
START = re.compile(r"hot cache on \S+: (\d+) MiB, (\d+) slots per layer \((\d+) experts\) in (\d+) layers")
END = re.compile(r"hot cache: (\d+) hits, (\d+) misses, hit rate ([\d.]+) %; ([\d.]+) MiB copied")


@dataclass(frozen=True)
class Bench:
    """A model on a device, and how llama-bench is to run it: on which device, with which threads."""

    programs: Programs
    model: Path
    sizes: Sizes
    device: str
    arguments: list  # that make the device known
    n_gpu_layers: int  # where dense layers go
    threads: int = 0
    tests: dict = field(default_factory=dict)  # settings for tests

    @property
    def budget(self) -> Budget:
        return self.programs.budget

    def command(self, *arguments: object) -> list:
        """No argument twice: llama-bench would run once with each value."""
        threads = ["-t", self.threads] if self.threads else []
        placed = ["-ngl", self.n_gpu_layers, *threads]
        return [BIN / "llama-bench", "-m", self.model, "-o", "json", "--repack", 0, *self.arguments, *placed, *arguments]

    def stock(self, *arguments: object) -> dict:
        output, _, memory = self.programs.run(self.command(*arguments))
        return speeds(output) | {"memory": memory}

    def cached(self, profile: Path, mib: int, *arguments: object, **variables: object) -> dict:
        """With a cache of so many MiB that begins with a copy of the profile, and learns."""
        used = self.programs.work / "used.json"
        shutil.copy(profile, used)
        ours = {
            "LLAMA_ARG_MOE_HOT_CACHE": used,
            "LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB": mib,
            "LLAMA_ARG_MOE_HOT_CACHE_DEVICE": self.device,
            **self.tests,
        }
        environment = self.programs.environment(GGML_BACKEND_PATH=PLUGIN, **ours | variables)
        output, said, _ = self.programs.run(self.command(*CPU_MOE, *arguments), environment)
        return speeds(output) | of_cache(said)


def speeds(output: str) -> dict[str, float]:
    """Tokens per second of prompt and decode; of several runs, the last."""
    return {"prompt" if row["n_prompt"] else "decode": row["samples_ts"][-1] for row in json.loads(output)}


def of_cache(said: str) -> dict:
    """What the plugin says: how much it took, what came of it, and whether it was off. The last lines count: llama-bench's first
    context needs one layer only and decodes nothing."""
    lines = [line.split("moe-hot: ", 1)[1] for line in said.splitlines() if "moe-hot: " in line]
    start, end = (next((m for m in map(pattern.search, reversed(lines)) if m), None) for pattern in (START, END))
    others = [line for line in lines if not START.search(line) and not END.search(line)]
    given_up = [line for line in others if OFF.search(line)]
    return {
        "mib": int(start[1]) if start else 0,
        "slots": int(start[2]) if start else 0,
        "hit_rate": float(end[3]) / 100 if end else None,
        "is_off": bool(given_up) or not end or float(end[3]) < LEAST_HITS_PERCENT,
        "copied_mib": float(end[4]) if end else None,
        "says": [*given_up, *(line for line in others if line not in given_up)][:3],
    }


def told(rounds: list[dict]) -> dict:
    """What the cache of one round has said: of the first in which it was off, else of the last."""
    one = next((run for run in rounds if run["is_off"]), rounds[-1])
    return {name: one[name] for name in ("mib", "slots", "hit_rate", "is_off", "copied_mib", "says")}


def in_turns(budget: Budget, runs: dict[str, Callable[[], dict]], most: int = MOST_ROUNDS) -> dict[str, list[dict]]:
    """What each run returns, round by round; which one goes first changes from round to round."""
    results: dict[str, list[dict]] = {name: [] for name in runs}
    names = list(runs)

    def one_round() -> None:
        first = len(results[names[0]]) % len(names)
        taken = {name: runs[name]() for name in names[first:] + names[:first]}
        for name, result in taken.items():
            results[name].append(result)

    budget.repeat(one_round, LEAST_ROUNDS, most)
    return results


def ratio(runs: dict[str, list[dict]], over: str, under: str, what: str) -> dict:
    """One over the other, round by round."""
    ratios = [a[what] / b[what] for a, b in zip(runs[over], runs[under], strict=True)]
    medians = {name: statistics.median(run[what] for run in runs[name]) for name in (over, under)}
    return {
        "median": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "rounds": len(ratios),
        "speeds": medians,
    }


def tune(bench: Bench) -> dict:
    """Stock's decode speed with all experts on the CPU, by threads."""
    n = len(os.sched_getaffinity(0))
    tried: dict[int, float] = {}
    for threads in sorted({max(1, n // 2), max(1, n - 2), n}):
        command = bench.command(*CPU_MOE, "-t", threads, "-p", 0, "-n", TUNING_TOKENS, "-r", 2)
        tried[threads] = speeds(bench.programs.run(command)[0])["decode"]
    return {"decode_by_threads": tried, "threads": max(tried, key=tried.__getitem__)}


def overhead(bench: Bench) -> dict:
    arguments = [*CPU_MOE, "-p", N_PROMPT, "-n", N_DECODE, "-r", 1]
    profile = bench.programs.work / "recorded.json"

    def recording() -> dict:
        environment = bench.programs.environment(GGML_BACKEND_PATH=PLUGIN, LLAMA_ARG_MOE_LAYER_PERF_OUT=profile)
        profile.unlink(missing_ok=True)
        output, _, memory = bench.programs.run(bench.command(*arguments), environment)
        if not json.loads(profile.read_text())["summary"]["layer_calls"]:
            raise Failed("the plugin computed nothing")
        return speeds(output) | {"memory": memory}

    runs = in_turns(bench.budget, {"plugin": recording, "stock": lambda: bench.stock(*arguments)})
    return {what: ratio(runs, "plugin", "stock", what) for what in ("decode", "prompt", "memory")}


def layers(bench: Bench, profile: Path) -> dict:
    """Microseconds of a layer's call, by how many of its experts are resident; the set is fixed."""
    times = bench.programs.work / "times.json"
    measured = {}
    for share in (0.0, *SHARES):
        slots = round(share * bench.sizes.n_expert)
        times.unlink(missing_ok=True)
        tests = {
            "MOE_HOT_TEST_SLOTS": slots,
            "MOE_HOT_TEST_TIMINGS": times,
            "MOE_HOT_TEST_NO_GUARD": 1,
            "MOE_HOT_TEST_WAIT": 1,
        }
        found = bench.cached(profile, -1, "-p", 0, "-n", N_DECODE, "-r", 1, LLAMA_ARG_MOE_HOT_CACHE_UPDATE_RATE=0, **tests)
        kinds = {kind: of_calls(summed) for kind, summed in json.loads(times.read_text()).items() if summed["calls"]}
        measured[f"{share:.0%}"] = {"slots": slots, "decode": found["decode"], "calls": kinds}
    return measured


def of_calls(summed: dict) -> dict:
    n = summed["calls"]
    parts = {name: summed[f"{name}_ns"] / 1e3 / n for name in ("plan_and_launch", "cold", "join")}
    return {"calls": n, "hits_per_call": summed["hits"] / n, "requests_per_call": summed["requests"] / n, "us": parts}


def cache(bench: Bench, profile: Path) -> dict:
    """At each share of the experts' bytes: whole layers of that many bytes on the GPU, and a cache of as many."""
    measured: dict[str, dict] = {}
    arguments = ["-p", 0, "-n", N_DECODE, "-r", REPETITIONS]
    wanted = sorted(SHARES, key=lambda share: share != TELLING)
    for number, share in enumerate(wanted):
        whole = round(share * bench.sizes.n_layer)
        mib = whole * bench.sizes.n_expert * bench.sizes.expert_bytes // MIB
        runs = {
            "cache": lambda mib=mib: bench.cached(profile, mib, *arguments),
            "whole layers": lambda whole=whole: bench.stock("-ncmoe", bench.sizes.n_layer - whole, *arguments),
        }
        if share == TELLING:
            runs["all on the CPU"] = lambda: bench.stock(*CPU_MOE, *arguments)
        try:
            with narrowed(bench.budget, len(wanted) - number):
                taken = in_turns(bench.budget, runs)
        except Skipped as reason:
            measured[f"{share:.0%}"] = {"skipped": str(reason)}
            continue
        measured[f"{share:.0%}"] = {
            "n_cpu_moe": bench.sizes.n_layer - whole,
            "mib": mib,
            "cache": told(taken["cache"]),
            "to whole layers": ratio(taken, "cache", "whole layers", "decode"),
        }
        if share == TELLING:
            measured[f"{share:.0%}"]["to all on the CPU"] = ratio(taken, "cache", "all on the CPU", "decode")
    if all("skipped" in found for found in measured.values()):
        raise Skipped(measured["50%"]["skipped"])
    return measured


class narrowed:
    """Gives the next of several the same share of what is left."""

    def __init__(self, budget: Budget, n_left: int):
        self.budget, self.n_left = budget, n_left

    def __enter__(self) -> None:
        self.before = self.budget.part_end
        self.budget.part_end -= self.budget.left_s * (1 - 1 / self.n_left)

    def __exit__(self, *_: object) -> None:
        self.budget.part_end = self.before


def prompts(bench: Bench, profile: Path) -> dict:
    """Half of the experts are resident by the time the second prompt is read: that one counts, in both."""
    mib = bench.sizes.all_expert_bytes // 2 // MIB
    # Twice the same: prompt, decode, prompt, decode, with one model.
    arguments = ["-p", N_PROMPT, "-n", N_DECODE // 2, "-r", 2, "--poll", "50,50"]
    runs = {
        "cache": lambda: bench.cached(profile, mib, *arguments),
        "stock": lambda: bench.stock(*CPU_MOE, *arguments),
    }
    taken = in_turns(bench.budget, runs)
    return {"prompt": ratio(taken, "cache", "stock", "prompt"), "tokens": N_PROMPT, "cache": told(taken["cache"])}
