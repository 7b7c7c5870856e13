"""Reads a profile (experts.json) as strictly as its format page says, and answers questions about its counts."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

SCHEMA = "llama.cpp.moe_layer_perf.v1"
BATCH_CLASSES = ("batch_1", "batch_2_up")


def as_counts(pairs: list) -> dict[int, int]:
    """[[expert, count], ...], ascending neither demanded nor refused, zeros and repeats refused."""
    counts = {expert: count for expert, count in pairs}
    assert len(counts) == len(pairs), f"an expert is listed twice: {pairs}"
    assert all(count > 0 for count in counts.values()), f"zeros are left out: {pairs}"
    return counts


def add(a: dict[int, int], b: dict[int, int]) -> dict[int, int]:
    return {expert: a.get(expert, 0) + b.get(expert, 0) for expert in a.keys() | b.keys()}


@dataclass
class Profile:
    """A profile whose inner consistency has been checked by `check`."""

    raw: dict
    cached: bool = False  # whether experts may have run on a device

    @classmethod
    def read(cls, path: Path, cached: bool = False) -> "Profile":
        profile = cls(json.loads(path.read_text()), cached)
        profile.check()
        return profile

    @property
    def layer_calls(self) -> int:
        return self.raw["summary"]["layer_calls"]

    @property
    def n_expert_used(self) -> int:
        return self.raw["n_expert_used"]

    @property
    def hits(self) -> int:
        """Requests that ran on a device."""
        return sum(layer["hot_slots_total"] for layer in self.raw["layers"])

    @property
    def layers(self) -> list[int]:
        return [layer["layer"] for layer in self.raw["layers"]]

    @property
    def calls(self) -> dict[int, int]:
        """Expert FFNs computed in each layer."""
        return {layer["layer"]: layer["calls"] for layer in self.raw["layers"]}

    @property
    def blocks(self) -> dict[int, str]:
        """How complete each layer's expert FFN was."""
        return {layer["layer"]: layer["block"] for layer in self.raw["moe_hot"]["layers"]}

    @property
    def n_expert_used_by_layer(self) -> dict[int, int]:
        return {layer["layer"]: layer["n_expert_used"] for layer in self.raw["moe_hot"]["layers"]}

    @property
    def n_requests(self) -> dict[int, int]:
        """(token, expert) pairs that each layer saw."""
        return {layer["layer"]: sum(as_counts(layer["experts"]).values()) for layer in self.raw["layers"]}

    @property
    def n_rows(self) -> dict[int, int]:
        """Tokens that each layer saw."""
        for layer, n in self.n_requests.items():
            assert n % self.n_expert_used == 0, f"layer {layer}: {n} requests, {self.n_expert_used} per token"
        return {layer: n // self.n_expert_used for layer, n in self.n_requests.items()}

    @property
    def by_batch_size(self) -> dict[int, dict]:
        """{layer: {"batch_1": {"calls": n, "experts": {expert: count}}, "batch_2_up": ...}}, empty classes left out"""
        return {
            layer["layer"]: {
                name: {"calls": layer[name]["calls"], "experts": as_counts(layer[name]["experts"])}
                for name in BATCH_CLASSES
                if layer[name]["calls"]
            }
            for layer in self.raw["moe_hot"]["layers"]
        }

    def check(self) -> None:
        raw = self.raw
        assert raw["schema"] == SCHEMA
        assert raw["enabled"] is True
        assert raw["mode"] == "full"
        assert raw["overflow_resets"] == 0
        assert raw["updates"] >= 0
        assert raw["summary"]["layer_calls"] == sum(layer["calls"] for layer in raw["layers"])
        n_requests = sum(layer["hot_slots_total"] + layer["cold_slots_total"] for layer in raw["layers"])
        assert abs(raw["summary"]["hot_slot_ratio"] * n_requests - self.hits) < 0.001 * max(n_requests, 1)
        assert re.fullmatch("[0-9a-f]+", raw["model"]["fingerprint"])
        assert raw["moe_hot"]["format"] == 1
        assert raw["moe_hot"]["min_batch_stock"] == 32
        assert [layer["layer"] for layer in raw["moe_hot"]["layers"]] == self.layers
        for layer, ours in zip(raw["layers"], raw["moe_hot"]["layers"], strict=True):
            self._check_layer(layer, ours)
        for name in ("n_expert", "n_expert_used"):  # the largest, where layers differ
            assert raw[name] == max(layer[name] for layer in raw["moe_hot"]["layers"])

    def _check_layer(self, layer: dict, ours: dict) -> None:
        experts = as_counts(layer["experts"])
        n_requests = sum(experts.values())
        assert all(0 <= expert < ours["n_expert"] for expert in experts)
        hot, cold = as_counts(layer["hot_experts"]), as_counts(layer["cold_experts"])
        assert add(hot, cold) == experts
        assert layer["hot_slots_total"] == sum(hot.values())
        assert layer["cold_slots_total"] == sum(cold.values())
        assert self.cached or hot == {}
        assert abs(layer["hot_slot_ratio"] * n_requests - sum(hot.values())) < 0.001 * max(n_requests, 1)
        for name, counts in (("hot", hot), ("cold", cold)):
            per_call = layer[f"{name}_slots_per_call"]
            assert abs(per_call * layer["calls"] - sum(counts.values())) < 0.01 * max(layer["calls"], 1)
        assert re.fullmatch("[0-9a-f]+", ours["fingerprint"])
        one, more = (as_counts(ours[name]["experts"]) for name in BATCH_CLASSES)
        assert add(one, more) == experts
        assert ours["batch_1"]["calls"] + ours["batch_2_up"]["calls"] == layer["calls"]
        assert sum(one.values()) == ours["batch_1"]["calls"] * ours["n_expert_used"]
