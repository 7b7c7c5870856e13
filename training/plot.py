"""Draws loss.svg from loss.csv: training loss (running mean) and held-out loss per kind against tokens."""
import argparse
import csv
from pathlib import Path

import matplotlib
import numpy as np

from data import KINDS

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "loss"  # the same file for the same numbers
from matplotlib import pyplot  # noqa: E402


def column(rows: list[dict], x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    filled = [(float(r[x]), float(r[y])) for r in rows if r[y]]
    return np.array([a for a, _ in filled]), np.array([b for _, b in filled])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    with options.csv.open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    tokens, loss = column(rows, "tokens", "loss")
    window = min(10, len(loss))
    mean = np.convolve(loss, np.ones(window) / window, mode="valid")
    axes.plot(tokens[window - 1:] / 1e6, mean, color="grey", label=f"training, mean of {window} logged steps")
    for kind in KINDS:
        tokens, loss = column(rows, "tokens", f"heldout_{kind}")
        axes.plot(tokens / 1e6, loss, marker=".", label=f"held out, {kind}")
    axes.set(xlabel="million tokens", ylabel="cross entropy (nats per token)", ylim=(2, 7))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
