"""Renders docs/models.md from what the end-to-end tests recorded (tests/e2e/results.py says in which format).

    scripts/test --full && scripts/models-table

Takes the newest run of the whole suite with --full; --any takes all rows of all runs, of equal ones the newest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "build/tests/results"
PIN = REPOSITORY / "ggml-hooks/pin.env"

COMMAND = "scripts/test --full && scripts/models-table"
RPC = ", dense on RPC"
SHAPES_WAY = "--cpu-moe"  # the way by which every shape and type is tested
PLACES = ("CPU only", "dense layers on a device (RPC)")
NOT_TESTED = "—"

ABOUT = {
    "qwen3moe": "gate, up, SwiGLU, down",
    "qwen3moe-scales": "with one factor per expert behind each projection",
    "qwen3moe+lora": "with a LoRA adapter on all expert tensors",
    "qwen2moe": "beside a shared expert",
    "granitemoe": "beside a shared expert, residual scaled",
    "deepseek2": "leading dense layer, grouped routing, shared experts",
    "llama4": "router weights before the FFN, every second layer",
    "llama4-top1": "the same with one expert per token",
    "grovemoe": "a second group of chunk experts, ids repeat within a token",
    "gpt-oss": "a bias per expert, clamped GLU",
    "gpt-oss+lora": "the same with a LoRA adapter",
    "gemma4": "gate and up in one tensor, GELU, factors behind down",
    "gemma4+lora": "the same with a LoRA adapter",
    "nomic-bert-moe": "no gate, GELU; encoder, embeddings compared",
    "nomic-bert-moe+lora": "the same with a LoRA adapter",
    "nemotron_h_moe": "no gate, squared ReLU, between Mamba layers",
    "nemotron_h_moe-by-layer": "the same, experts per token and FFN size differ by layer",
    "step35": "SwiGLU with limits from CLAMP, SILU, MUL",
    "kimi-k3": "SiTU from SCALE, TANH, SIGMOID, MUL; experts in a smaller space",
    "maple": "SwiGLU with limits as one operation",
}


@dataclass(frozen=True)
class Run:
    """The rows of one run of the tests, or of several."""

    started: datetime
    rows: list[dict]
    summary: dict = field(default_factory=dict)


def read_run(path: Path) -> Run:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    summary = next((entry["run"] for entry in entries if "run" in entry), {})
    started = datetime.fromtimestamp(int(path.stem.split("-")[0]), UTC)
    return Run(started, [entry for entry in entries if "run" not in entry], summary)


def choose(runs: list[Run], any_run: bool) -> Run:
    """`runs`: oldest first."""
    if any_run and runs:
        return Run(runs[-1].started, [row for run in runs for row in run.rows])
    whole = [run for run in runs if run.summary.get("whole")]
    if not whole:
        message = "no whole run in build/tests/results: run `build/venv/bin/python -m pytest tests/e2e --full` first"
        sys.exit(message if not any_run else "no run in build/tests/results")
    return whole[-1]


def outcome(row: dict) -> str:
    return f"{row['outcome']}: {row['detail']}" if row["detail"] else row["outcome"]


def place(row: dict) -> str:
    return PLACES[row["way"].endswith(RPC)]


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def by_place(rows: list[dict], key) -> dict[tuple, dict[str, str]]:
    """{key(row): {place: outcome}}, later rows win."""
    table: dict[tuple, dict[str, str]] = {}
    for row in rows:
        table.setdefault(key(row), {})[place(row)] = outcome(row)
    return table


def cells(outcomes: dict[str, str]) -> list[str]:
    return [outcomes.get(name, NOT_TESTED) for name in PLACES]


def shapes_section(rows: list[dict]) -> list[str]:
    rows = [row for row in rows if row["way"].removesuffix(RPC) == SHAPES_WAY]
    table = by_place(rows, lambda row: (row["shape"], row["type"]))
    order = list(ABOUT)
    found = sorted(table, key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key))
    lines = [[f"`{shape}`", ABOUT.get(shape, ""), kind, *cells(table[shape, kind])] for shape, kind in found]
    return markdown_table(["shape", "what is special", "type of the experts", *PLACES], lines)


def ways_section(rows: list[dict]) -> list[str]:
    table = by_place(rows, lambda row: (row["way"].removesuffix(RPC), row["shape"], row["type"]))
    ways = [key for key in table if key[0] != SHAPES_WAY or key[1:] == ("qwen3moe", "Q4_K")]
    lines = [[f"`{way}`" if way.startswith("-") else way, f"`{shape}`", kind, *cells(table[way, shape, kind])]
             for way, shape, kind in sorted(ways)]
    return markdown_table(["way in", "shape", "type of the experts", *PLACES], lines)


def machine() -> str:
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"{model[1] if model else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def revision() -> str:
    pin = dict(line.split("=", 1) for line in PIN.read_text().splitlines() if "=" in line and line[0] != "#")
    return f"{pin['LLAMA_COMMIT']} (b{pin['LLAMA_BUILD']}, ggml {pin['GGML_VERSION']})"


def header(run: Run) -> list[str]:
    source = "several runs of the tests, not all of them whole"
    if run.summary:
        counts = f"{run.summary['passed']} tests passed, {run.summary['failed']} failed"
        source = f"`build/venv/bin/python -m pytest tests/e2e --full` ({counts})"
    return [
        "# Models, types and ways in",
        "",
        f"Generated by `{COMMAND}`",
        f"from {source} of {run.started:%Y-%m-%d}.",
        f"Machine: {machine()}. llama.cpp: {revision()}.",
        "",
        "Every row was run twice, with stock llama.cpp (`--no-repack`) and with the plugin recording, nothing resident.",
        "**equal**: the plugin computed the expert FFNs and the answer had the same bits; every shape came in one",
        "split per layer (grovemoe: per layer and group of experts). **declined**: the plugin left the experts to",
        f"llama.cpp and the answer had the same bits. {NOT_TESTED}: not tested in this combination. Models have random",
        "weights and a few MB; a shape is named after llama.cpp's architecture.",
        "",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--any", action="store_true", help="all rows of all runs, whole or not")
    arguments = parser.parse_args()
    runs = [read_run(path) for path in sorted(RESULTS.glob("*.jsonl"))]
    run = choose(runs, arguments.any)
    lines = [
        *header(run),
        "## Shapes and types, with `--cpu-moe`",
        "",
        *shapes_section(run.rows),
        "",
        "## Ways in",
        "",
        *ways_section(run.rows),
    ]
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
