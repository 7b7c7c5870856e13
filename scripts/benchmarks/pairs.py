"""Runs taken in turns, and what they say: medians with bootstrapped intervals."""

import sys
from collections.abc import Callable

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
BOOTSTRAP_SEED = 1


def in_turns(runs: dict[str, Callable[[], dict]], rounds: int) -> dict[str, list[dict]]:
    """What each run returns, round by round; which one goes first changes from round to round."""
    results: dict[str, list[dict]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(runs[name]())
        print(f"\r{number + 1} of {rounds} rounds", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def median(values) -> dict:
    """The median and its bootstrapped interval."""
    values = np.asarray(values, float)
    spread = stats.bootstrap(
        (values,), np.median, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(BOOTSTRAP_SEED)
    )
    return {"median": float(np.median(values)), "interval": [float(end) for end in spread.confidence_interval]}


def ratio(runs: dict[str, list[dict]], over: str, under: str, what: str) -> dict:
    """One over the other, round by round."""
    values = {name: np.array([run[what] for run in runs[name]]) for name in (over, under)}
    ratios = values[over] / values[under]
    of_ratios = median(ratios)
    return {
        "median_ratio": of_ratios["median"],
        "interval": of_ratios["interval"],
        **{f"{name}_median": float(np.median(values[name])) for name in (under, over)},
        "ratios": ratios.tolist(),
    }


def shown(measured: dict, digits: int = 3) -> str:
    """What `median` or `ratio` returned, in words."""
    low, high = measured["interval"]
    middle = measured["median_ratio"] if "median_ratio" in measured else measured["median"]
    return f"median {middle:.{digits}f}, 95 % interval {low:.{digits}f} to {high:.{digits}f}"
