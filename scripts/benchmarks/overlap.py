"""What it brings that both lanes work at the same time: half of the experts are resident on FakeDevice, one CPU thread
computes the others. All runs are taken in turns.

Layer calls: FakeDevice computes nothing and takes the time that the CPU takes for the resident experts of an average
call, as measured so far. One after the other, the lanes would take as long as all on the CPU; at best half of that.

Decode: FakeDevice computes in one thread of its own. Beside it stands what a second thread brings stock."""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import programs
from benchmarks.hot import Calls, HotLane
from benchmarks.pairs import in_turns, ratio, shown

HELP = "both lanes at the same time against all on the CPU"
RESIDENT = 0.5
# The first fills the cache.
REPETITIONS = 2
MAX_CALL_RATIO = 0.65
MIN_DECODE_RATIO = 1.2


def add_arguments(_: argparse.ArgumentParser) -> None:
    pass


@dataclass
class Runs:
    """The runs of one round, and the latency that follows from those before."""

    lane: HotLane
    folder: Path
    us_per_request: list[float] = field(default_factory=list)
    hits_per_call: float = 0

    def __post_init__(self) -> None:
        """Not measured: gives the first latency."""
        self.all_cold()
        self.hits_per_call = self.lane.run(self.slots, null_compute=1)[0]["mixed"].hits

    @property
    def slots(self) -> int:
        return round(RESIDENT * self.lane.n_expert)

    @property
    def latency_us(self) -> int:
        return round(self.hits_per_call * float(np.median(self.us_per_request)))

    def all_cold(self) -> dict:
        run = self._run("all_cold", 0)
        self.us_per_request.append(run["calls"].cold_us_per_request)
        return run

    def delayed(self) -> dict:
        latency_us = self.latency_us
        return self._run("mixed", self.slots, null_compute=1, latency_us=latency_us) | {"latency_us": latency_us}

    def computing(self) -> dict:
        return self._run("mixed", self.slots, threads=1)

    def _run(self, kind: str, slots: int, **fake: int) -> dict:
        calls, decode = self.lane.run(slots, REPETITIONS, **fake)
        return {"calls": calls[kind], "call_us": calls[kind].us, "decode": decode}

    def stock(self, n_threads: int) -> dict:
        command = [*self.lane.command, "-r", REPETITIONS, "-t", n_threads]
        return programs.speeds(programs.run(command, programs.environment(), self.folder)[0])


def measure(args: argparse.Namespace) -> dict:
    model = programs.bench_model(args.model)
    print(f"overlap: decode of {args.tokens} tokens, all runs of a round in turns", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = Runs(HotLane(model, args.tokens, folder), folder)
        in_round = {
            "all_cold": runs.all_cold,
            "delayed": runs.delayed,
            "computing": runs.computing,
            "stock_1": lambda: runs.stock(1),
            "stock_2": lambda: runs.stock(2),
        }
        taken = in_turns(in_round, args.pairs)
    return {
        "model": model.name,
        "pairs": args.pairs,
        "tokens": args.tokens,
        "slots": runs.slots,
        "n_expert": runs.lane.n_expert,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "results": {
            "calls": of_calls(taken),
            "decode": of_decode(taken, runs.lane.n_layer),
            "stock_threads": ratio(taken, "stock_2", "stock_1", "decode"),
        },
    }


def parts(runs: list[dict]) -> dict:
    calls: list[Calls] = [run["calls"] for run in runs]
    names = ("plan_and_launch_us", "cold_us", "join_us")
    return {name: float(np.median([getattr(call, name) for call in calls])) for name in names}


def hit_share(runs: list[dict]) -> float:
    calls: list[Calls] = [run["calls"] for run in runs]
    return sum(call.hits * call.n for call in calls) / sum(call.requests * call.n for call in calls)


def of_calls(taken: dict) -> dict:
    latencies = [run["latency_us"] for run in taken["delayed"]]
    return ratio(taken, "delayed", "all_cold", "call_us") | {
        "hit_share": hit_share(taken["delayed"]),
        "latency_us": latencies,
        "delayed_parts": parts(taken["delayed"]),
        "all_cold_parts": parts(taken["all_cold"]),
    }


def of_decode(taken: dict, n_layer: int) -> dict:
    """`bound`: what would be reached if the resident experts cost nothing."""
    hits = hit_share(taken["computing"])
    shares = [n_layer * run["call_us"] * run["decode"] / 1e6 for run in taken["all_cold"]]
    expert_share = min(float(np.median(shares)), 1.0)
    return ratio(taken, "computing", "all_cold", "decode") | {
        "hit_share": hits,
        "expert_share": expert_share,
        "bound": 1 / (1 - hits * expert_share),
        "computing_parts": parts(taken["computing"]),
    }


def report(measured: dict) -> None:
    calls, decode, stock = (measured["results"][name] for name in ("calls", "decode", "stock_threads"))
    in_parts = ", ".join(f"{name.removesuffix('_us')} {us:.1f}" for name, us in calls["delayed_parts"].items())
    print(
        f"layer call, both lanes / all on the CPU: {shown(calls)}; {calls['delayed_median']:.1f} us ({in_parts}) and "
        f"{calls['all_cold_median']:.1f} us, {100 * calls['hit_share']:.1f} % hits, device's latency "
        f"{np.median(calls['latency_us']):.0f} us, {measured['pairs']} rounds"
    )
    print(
        f"decode, both lanes / all on the CPU: {shown(decode)}; {decode['computing_median']:.1f} and "
        f"{decode['all_cold_median']:.1f} t/s, {100 * decode['hit_share']:.1f} % hits; at most {decode['bound']:.2f}, as "
        f"experts take {100 * decode['expert_share']:.0f} % of the time"
    )
    print(
        f"decode, stock with two threads / with one: {shown(stock)}; {stock['stock_2_median']:.1f} and "
        f"{stock['stock_1_median']:.1f} t/s"
    )


def missed_bars(measured: dict) -> list[str]:
    calls, decode = measured["results"]["calls"], measured["results"]["decode"]
    missed = []
    if calls["median_ratio"] > MAX_CALL_RATIO:
        missed.append(f"layer call: expected a median of at most {MAX_CALL_RATIO} of all on the CPU")
    if decode["median_ratio"] < MIN_DECODE_RATIO:
        missed.append(f"decode: expected a median of at least {MIN_DECODE_RATIO} of all on the CPU")
    return missed
