"""How the generated model routes, beside real traces: hit rates of the cache's policies in `moe-hot replay`, how many experts two
tokens in a row have in common, and what the most used experts cover."""

import json
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from device.folder import BIN, TRACES, Programs

MAGIC = b"moe-hot trace 1\n"
N_TOKENS = 256
# Slots as shares of a layer's experts, and the policies that are replayed.
SHARES = (0.125, 0.25, 0.5, 0.75)
POLICIES = ("lru", "default", "belady")
REAL = ("prose", "code", "manual")


@dataclass
class Layer:
    n_expert: int
    n_used: int
    tokens: list[tuple[int, ...]] = field(default_factory=list)


def read_trace(path: Path) -> dict[int, Layer]:
    """What --moe-trace-out writes (docs/traces.md); all batches, one token after the other."""
    data = path.read_bytes()
    assert data.startswith(MAGIC), f"{path.name} is no trace"
    at, layers = len(MAGIC), {}
    while at < len(data):
        kind, at = data[at : at + 1], at + 1
        if kind == b"M":
            at += 16
        elif kind == b"L":
            number, n_expert, n_used, _ = struct.unpack_from("<HHHQ", data, at)
            layers[number], at = Layer(n_expert, n_used), at + 14
        else:
            number, n_tokens = struct.unpack_from("<HH", data, at)
            layer, at = layers[number], at + 4
            width = 1 if layer.n_expert <= 256 else 2
            n_ids = n_tokens * layer.n_used
            if at + n_ids * width > len(data):  # ends within a record: its program was killed
                break
            ids = struct.unpack_from(f"<{n_ids}{'B' if width == 1 else 'H'}", data, at)
            layer.tokens += [ids[i : i + layer.n_used] for i in range(0, n_ids, layer.n_used)]
            at += n_ids * width
    return layers


def overlap(layers: dict[int, Layer]) -> float:
    """The share of a token's experts that the token before it used too."""
    pairs = [(set(a), b) for layer in layers.values() for a, b in zip(layer.tokens, layer.tokens[1:], strict=False)]
    return sum(sum(expert in before for expert in now) for before, now in pairs) / sum(len(now) for _, now in pairs)


def coverage(layers: dict[int, Layer], share: float) -> float:
    """The share of all requests that so many of the experts, those used most, answer."""
    covered = requests = 0
    for layer in layers.values():
        counts = Counter(expert for token in layer.tokens for expert in token)
        covered += sum(n for _, n in counts.most_common(round(share * layer.n_expert)))
        requests += counts.total()
    return covered / requests


def statistics(programs: Programs, trace: Path) -> dict:
    layers = {number: layer for number, layer in read_trace(trace).items() if len(layer.tokens) > 1}
    first = next(iter(layers.values()))
    slots = {share: max(1, round(share * first.n_expert)) for share in SHARES}
    command = [
        BIN / "moe-hot",
        "replay",
        trace,
        "--slots",
        ",".join(map(str, slots.values())),
        "--policy",
        ",".join(POLICIES),
    ]
    rows = json.loads(programs.run([*command, "--json", "-"])[0])
    hits = {(row["policy"], row["slots"]): row["hit"] for row in rows}
    return {
        "layers": len(layers),
        "experts": first.n_expert,
        "experts_per_token": first.n_used,
        "tokens": max(len(layer.tokens) for layer in layers.values()),
        "overlap": overlap(layers),
        "coverage": {f"{share:.1%}": coverage(layers, share) for share in SHARES},
        "hits": {policy: {f"{share:.1%}": hits[policy, n] for share, n in slots.items()} for policy in POLICIES},
    }


def measure(programs: Programs, command: list) -> tuple[dict, Path]:
    """The statistics, and a profile of the same tokens; `command`: llama-bench with the model."""
    trace, profile = programs.work / "generated.trace", programs.work / "experts.json"
    recorded = ["--moe-trace-out", trace, "--moe-layer-perf-out", profile]
    programs.run([BIN / "moe-hot", *command, "-ncmoe", 999, "-p", 0, "-n", N_TOKENS, "-r", 1, *recorded])
    real = {name: statistics(programs, TRACES / f"{name}.trace") for name in REAL}
    return {"generated": statistics(programs, trace), **real}, profile
