"""Evaluates a checkpoint: perplexity of texts counted like llama-perplexity, and a report on the experts' use.

Prints Markdown tables for README.md.
"""
import argparse
import json
from itertools import combinations
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer

from data import KINDS
from model import Config, evaluate
from train import held_out_windows, load_checkpoint


def text_perplexity(config: Config, params: dict, ids: list[int], context: int) -> float:
    """llama-perplexity's measure: chunks of `context` tokens, the first one replaced by BOS; scores the second half."""
    chunks = np.array(ids[:len(ids) // context * context], dtype=np.int32).reshape(-1, context)
    chunks[:, 0] = 0
    losses = [np.asarray(evaluate(config, params, chunk[None])[0])[0] for chunk in chunks]
    return float(np.exp(np.mean(np.stack(losses)[:, context // 2:])))


def expert_counts(config: Config, params: dict, data: Path, windows: int) -> dict[str, np.ndarray]:
    """Choices per (layer, expert) on held-out windows of each kind."""
    counts = {}
    for kind in KINDS:
        tokens = held_out_windows(data, kind, config.context, windows)
        counts[kind] = sum(np.asarray(evaluate(config, params, w[None])[1]) for w in tokens)
    return counts


def top_quarter(counts: np.ndarray) -> set[int]:
    return set(np.argsort(-counts)[:len(counts) // 4].tolist())


def routing_table(counts: dict[str, np.ndarray]) -> list[str]:
    pairs = list(combinations(KINDS, 2))
    heads = [f"{a}/{b}" for a, b in pairs] + ["most used", "least used"] + [f"top 25 % take: {k}" for k in KINDS]
    rows = ["| layer | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    shares = {k: c / c.sum(axis=1, keepdims=True) for k, c in counts.items()}
    for layer in range(len(counts[KINDS[0]])):
        tops = {k: top_quarter(c[layer]) for k, c in counts.items()}
        mean = sum(shares[k][layer] for k in KINDS) / len(KINDS)
        cells = [f"{len(tops[a] & tops[b])} of {len(tops[a])}" for a, b in pairs]
        cells += [f"{100 * mean.max():.1f} %", f"{100 * mean.min():.1f} %"]
        cells += [f"{100 * shares[k][layer][sorted(tops[k])].sum():.0f} %" for k in KINDS]
        rows.append(f"| {layer} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="folder with {kind}.txt")
    parser.add_argument("--windows", type=int, default=40, help="held-out windows per kind for the routing table")
    options = parser.parse_args()

    config = Config(**json.loads((options.run / "config.json").read_text())["model"])
    params = load_checkpoint(options.run / "checkpoint.pkl")["params"]
    params = jax.device_put(params)
    tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
    for kind in KINDS:
        ids = [0] + tokenizer.encode((options.texts / f"{kind}.txt").read_text(encoding="utf-8")).ids
        print(f"{kind}: {len(ids)} tokens, perplexity {text_perplexity(config, params, ids, config.context):.3f}")
    print("\n".join(routing_table(expert_counts(config, params, options.data, options.windows))))


if __name__ == "__main__":
    main()
