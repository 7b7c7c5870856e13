"""Trains the model: balanced batches, AdamW, schedule by tokens, checkpoints, a loss curve as CSV.

Runs until the planned tokens are seen, or, when a file `finish` with a number of steps appears in the run folder,
decays the learning rate over that many steps and stops. Restarting with the same --run folder continues from its
checkpoint.
"""
import argparse
import csv
import json
import pickle
import time
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from data import KINDS
from model import Config, evaluate, init_params, training_loss

CSV_FIELDS = ("step", "tokens", "seconds", "learning_rate", "loss", "balance", "dropped",
              *(f"heldout_{kind}" for kind in KINDS))


class Batches:
    """Windows of context + 1 tokens, the same number from each kind; each kind is walked in shuffled epochs.

    The first token of a window is replaced by end-of-text, which is the BOS that llama.cpp puts first.
    """

    def __init__(self, data: Path, context: int, windows_per_kind: int, seed: int = 0):
        self.streams = [np.load(data / f"train_{kind}.npy") for kind in KINDS]
        self.context, self.windows, self.seed = context, windows_per_kind, seed

    def starts(self, kind: int, epoch: int) -> np.ndarray:
        """Shuffled window starts; the offset differs by epoch, the number of windows does not."""
        random = np.random.default_rng((self.seed, kind, epoch))
        offset = random.integers(self.context)
        starts = np.arange(offset, len(self.streams[kind]) - self.context - 1, self.context)
        return random.permutation(starts)[:len(self.streams[kind]) // self.context - 2]

    def batch(self, step: int) -> np.ndarray:
        rows = []
        for kind, stream in enumerate(self.streams):
            per_epoch = len(stream) // self.context - 2
            for number in range(step * self.windows, (step + 1) * self.windows):
                epoch, place = divmod(number, per_epoch)
                start = self.starts(kind, epoch)[place]
                rows.append(stream[start:start + self.context + 1].astype(np.int32))
        windows = np.stack(rows)
        windows[:, 0] = 0
        return windows


def learning_rate(step: int, total: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine from the peak to 5 % of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * progress)))


def decayed(path, _) -> bool:
    """Weight decay is for the matrices, not for the norms."""
    return "norm" not in jax.tree_util.keystr(path)


def make_optimizer(params) -> optax.GradientTransformation:
    mask = jax.tree_util.tree_map_with_path(decayed, params)
    return optax.chain(optax.clip_by_global_norm(1.0),
                       optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
                       optax.add_decayed_weights(0.1, mask=mask))


def make_step(config: Config, optimizer, balance_weight: float, capacity_factor: float):
    def step(params, state, windows, rate):
        gradient = jax.grad(lambda p: training_loss(config, p, windows, balance_weight, capacity_factor), has_aux=True)
        grads, parts = gradient(params)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state, parts
    return jax.jit(step, donate_argnums=(0, 1))


def held_out_windows(data: Path, kind: str, context: int, count: int) -> np.ndarray:
    """Evenly spaced windows of the held-out stream."""
    stream = np.load(data / f"test_{kind}.npy")
    starts = np.linspace(0, len(stream) - context - 1, count).astype(int)
    windows = np.stack([stream[s:s + context + 1] for s in starts]).astype(np.int32)
    windows[:, 0] = 0
    return windows


def save_checkpoint(path: Path, **content) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(jax.device_get(content), protocol=4))
    part.replace(path)


def load_checkpoint(path: Path) -> dict:
    return pickle.loads(path.read_bytes())


def append_row(path: Path, row: dict) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, CSV_FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def drop_rows_after(path: Path, step: int) -> None:
    """Removes the rows of steps that are about to be repeated from a checkpoint."""
    if path.exists():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
        path.unlink()
        for row in rows:
            append_row(path, row)


class Finish:
    """Ends the run early: from the step at which the file appears, the rate falls linearly to 5 % of the peak."""

    def __init__(self, file: Path, peak: float):
        self.file, self.floor, self.started = file, 0.05 * peak, None

    def rate(self, step: int, planned: float) -> float:
        if self.started is None and self.file.exists():
            self.started, self.start_rate, self.steps = step, planned, int(self.file.read_text())
        if self.started is None:
            return planned
        return self.floor + (self.start_rate - self.floor) * max(1 - (step - self.started) / self.steps, 0)

    def is_over(self, step: int) -> bool:
        return self.started is not None and step >= self.started + self.steps


def train(options: argparse.Namespace) -> None:
    config = Config()
    run: Path = options.run
    run.mkdir(parents=True, exist_ok=True)
    batches = Batches(options.data, config.context, options.windows_per_kind)
    per_step = options.windows_per_kind * len(KINDS) * config.context
    total = options.tokens // per_step
    params = init_params(config, jax.random.PRNGKey(0))
    optimizer = make_optimizer(params)
    state, first, seconds = optimizer.init(params), 0, 0.0
    checkpoint = run / "checkpoint.pkl"
    if checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        params, state, first, seconds = (saved[k] for k in ("params", "state", "step", "seconds"))
    drop_rows_after(run / "loss.csv", first)
    update = make_step(config, optimizer, options.balance_weight, options.capacity_factor)
    held_out = {k: held_out_windows(options.data, k, config.context, options.eval_windows) for k in KINDS}
    finish = Finish(run / "finish", options.peak_rate)
    (run / "config.json").write_text(json.dumps({"model": asdict(config), "tokens_per_step": per_step} | {
        k: v for k, v in vars(options).items() if not isinstance(v, Path)}, indent=1) + "\n")

    last = time.monotonic()
    for step in range(first, total):
        rate = finish.rate(step, learning_rate(step, total, options.peak_rate, options.warmup))
        params, state, parts = update(params, state, jnp.asarray(batches.batch(step)), rate)
        done = step + 1
        ends = done == total or finish.is_over(done)
        if done % options.log_every == 0 or ends:
            row = {"step": done, "tokens": done * per_step, "learning_rate": f"{rate:.3e}"}
            row |= {k: f"{float(v):.4f}" for k, v in parts.items()}
            if done % options.eval_every == 0 or ends:
                row |= {f"heldout_{k}": f"{float(evaluate(config, params, w)[0].mean()):.4f}"
                        for k, w in held_out.items()}
            now = time.monotonic()
            seconds, last = seconds + now - last, now
            row["seconds"] = f"{seconds:.1f}"
            append_row(run / "loss.csv", row)
            print(row, flush=True)
        if done % options.save_every == 0 or ends:
            save_checkpoint(checkpoint, params=params, state=state, step=done, seconds=seconds)
        if ends:
            break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder written by data.py")
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoint.pkl and loss.csv")
    parser.add_argument("--tokens", type=int, default=10_000_000, help="planned tokens")
    parser.add_argument("--windows-per-kind", type=int, default=4)
    parser.add_argument("--peak-rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--balance-weight", type=float, default=0.01)
    parser.add_argument("--capacity-factor", type=float, default=1.5)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-windows", type=int, default=16, help="held-out windows per kind")
    parser.add_argument("--save-every", type=int, default=100)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
