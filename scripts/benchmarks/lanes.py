"""What a layer call costs besides the computing when some or all of its experts are resident: planning and launching
before the CPU lane begins, joining after it. FakeDevice computes nothing and takes no time."""

import argparse
import sys
from pathlib import Path

from benchmarks.hot import Calls, HotLane
from benchmarks.pairs import in_turns, median, shown

RESIDENT = {"25": 0.25, "50": 0.5, "100": 1.0}
BASELINE = "0"
MAX_US = 25


def measure(model: Path, args: argparse.Namespace, folder: Path) -> dict:
    print(f"lanes: decode of {args.tokens} tokens", file=sys.stderr)
    lane = HotLane(model, args.tokens, folder)

    def run(share: str) -> dict[str, Calls]:
        return lane.run(round(RESIDENT.get(share, 0) * lane.n_expert), null_compute=1)[0]

    runs = in_turns({share: lambda share=share: run(share) for share in (BASELINE, *RESIDENT)}, args.pairs)
    return {share: of_share(runs[share], runs[BASELINE], share) for share in RESIDENT}


def of_share(runs: list[dict[str, Calls]], baseline: list[dict[str, Calls]], share: str) -> dict:
    kind = "all_hot" if RESIDENT[share] == 1 else "mixed"
    calls, cold = [run[kind] for run in runs], [run["all_cold"] for run in baseline]
    measured = {
        "hit_share": sum(c.hits * c.n for c in calls) / sum(c.requests * c.n for c in calls),
        "calls": sum(c.n for c in calls),
        "plan_and_launch_us": median([c.plan_and_launch_us for c in calls]),
        "join_us": median([c.join_us for c in calls]),
        "total_us": median([c.plan_and_launch_us + c.join_us for c in calls]),
        "first_call_us": median([run["first"].plan_and_launch_us + run["first"].join_us for run in runs]),
        "all_cold_us": median([c.plan_and_launch_us + c.join_us for c in cold]),
    }
    if kind == "mixed":
        measured["cold_us_per_expert"] = median([c.cold_us_per_request for c in calls])
        measured["all_cold_us_per_expert"] = median([c.cold_us_per_request for c in cold])
        added = [c.cold_us - (c.requests - c.hits) * b.cold_us_per_request for c, b in zip(calls, cold, strict=True)]
        measured["added_to_cold_us"] = median(added)
    return measured


def report(lanes: dict) -> None:
    for share, measured in lanes.items():
        print(
            f"lanes, {share} % resident: plan, launch and join: {shown(measured['total_us'], 1)} us "
            f"({measured['plan_and_launch_us']['median']:.1f} and {measured['join_us']['median']:.1f}); "
            f"{100 * measured['hit_share']:.1f} % hits in {measured['calls']} calls; "
            f"all on the CPU: {measured['all_cold_us']['median']:.1f} us"
        )
        if "added_to_cold_us" in measured:
            print(
                f"lanes, {share} % resident: added to the cold lane: {shown(measured['added_to_cold_us'], 1)} us per call; "
                f"{measured['cold_us_per_expert']['median']:.1f} us per expert, "
                f"{measured['all_cold_us_per_expert']['median']:.1f} where all are cold"
            )


def missed_bars(lanes: dict) -> list[str]:
    slow = [share for share, measured in lanes.items() if measured["total_us"]["median"] > MAX_US]
    return [f"lanes, {share} % resident: expected a median of at most {MAX_US} us" for share in slow]
