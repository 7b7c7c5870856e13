"""Runs llama-bench with the plugin's hot lane on FakeDevice, and reads where the layers' time went."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import programs

import paths
from fake import fake_environment

SCHEMA = "llama.cpp.moe_layer_perf.v1"
LANE = ["-ncmoe", 999, "--repack", 0, "-ngl", 0, "-p", 0, "-o", "json"]


@dataclass(frozen=True)
class Calls:
    """Layer calls of one kind in one run; times of a call in microseconds."""

    n: int
    requests: float
    hits: float
    plan_and_launch_us: float
    cold_us: float
    join_us: float

    @classmethod
    def of(cls, times: dict) -> "Calls":
        n = times["calls"]
        per_call = {name: times[name] / max(n, 1) for name in ("requests", "hits")}
        microseconds = {
            f"{name}_us": times[f"{name}_ns"] / 1e3 / max(n, 1) for name in ("plan_and_launch", "cold", "join")
        }
        return cls(n, **per_call, **microseconds)

    @property
    def us(self) -> float:
        return self.plan_and_launch_us + self.cold_us + self.join_us

    @property
    def hit_share(self) -> float:
        return self.hits / self.requests

    @property
    def cold_us_per_request(self) -> float:
        return self.cold_us / (self.requests - self.hits)


class HotLane:
    """A model, the decoding that is measured, and which of its experts may be resident."""

    def __init__(self, model: Path, n_tokens: int, folder: Path):
        self.folder = folder
        self.command = [programs.LLAMA_BENCH, "-m", model, *LANE, "-n", n_tokens]
        *_, self.recorded = programs.run_recording([*self.command, "-r", 1, "-t", 1], folder)

    @property
    def n_expert(self) -> int:
        return self.recorded["n_expert"]

    @property
    def n_layer(self) -> int:
        return len(self.recorded["layers"])

    def profile(self, slots: int) -> Path:
        """One that asks for so many experts per layer: often and seldom used ones alike, so that their share of the
        requests is that of the experts."""
        path = self.folder / f"residents-{slots}.json"
        layers = []
        for layer in self.recorded["layers"]:
            counts = dict(layer["experts"])
            ranked = sorted(range(self.n_expert), key=lambda expert: -counts.get(expert, 0))
            chosen = [e for n, e in enumerate(ranked) if (n + 1) * slots // self.n_expert > n * slots // self.n_expert]
            # With no slots too there must be something to ask for.
            layers.append({"layer": layer["layer"], "experts": [[expert, 1] for expert in sorted(chosen or ranked)]})
        path.write_text(json.dumps({"schema": SCHEMA, "n_expert": self.n_expert, "layers": layers}))
        return path

    def run(self, slots: int, repetitions: int = 1, **fake: int) -> tuple[dict[str, Calls], float]:
        """Layer calls by kind, and tokens per second of the last repetition. One CPU thread computes the cold experts."""
        times = self.folder / "times.json"
        times.unlink(missing_ok=True)
        ours = {
            "LLAMA_ARG_MOE_HOT_CACHE": self.profile(slots),
            "MOE_HOT_TEST_SLOTS": slots,
            "MOE_HOT_TEST_TIMINGS": times,
        }
        loaded = fake_environment(host_buffer=1, plugin=paths.PLUGIN, **ours, **fake)
        loaded = {name: value for name, value in loaded.items() if name.startswith(programs.NOT_INHERITED)}
        command = [*self.command, "-r", repetitions, "-t", 1]
        output, _ = programs.run(command, programs.environment(**loaded), self.folder)
        calls = {kind: Calls.of(summed) for kind, summed in json.loads(times.read_text()).items()}
        if slots and not calls["mixed"].n + calls["all_hot"].n:
            sys.exit("bench: nothing ran on FakeDevice")
        return calls, programs.speeds(output)["decode"]
