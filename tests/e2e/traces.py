"""Reads what --moe-trace-out writes, as docs/traces.md says."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

MAGIC = b"moe-hot trace 1\n"


@dataclass
class Trace:
    fingerprint: str | None = None
    layers: dict[int, tuple] = field(default_factory=dict)  # number: (n_expert, n_used, bytes of one expert)
    batches: list[tuple] = field(default_factory=list)  # (layer, number of tokens, ids)

    @classmethod
    def read(cls, path: Path) -> "Trace":
        data, trace = path.read_bytes(), cls()
        assert data[: len(MAGIC)] == MAGIC
        at = len(MAGIC)
        while at < len(data):
            kind, at = data[at : at + 1], at + 1
            if kind == b"M":
                trace.fingerprint, at = data[at : at + 16].decode(), at + 16
            elif kind == b"L":
                layer, n_expert, n_used, n_bytes = struct.unpack_from("<HHHQ", data, at)
                assert layer not in trace.layers
                trace.layers[layer], at = (n_expert, n_used, n_bytes), at + 14
            else:
                assert kind == b"B", f"a record of kind {kind} at {at - 1}"
                layer, n_tokens = struct.unpack_from("<HH", data, at)
                n_expert, n_used, _ = trace.layers[layer]
                n_ids, width = n_tokens * n_used, "B" if n_expert <= 256 else "H"
                ids = struct.unpack_from(f"<{n_ids}{width}", data, at + 4)
                trace.batches.append((layer, n_tokens, ids))
                at += 4 + struct.calcsize(f"<{n_ids}{width}")
        return trace

    def counts(self) -> dict[int, dict]:
        """As `Profile.by_batch_size`."""
        counts: dict[int, dict] = {}
        for layer, n_tokens, ids in self.batches:
            name = "batch_1" if n_tokens == 1 else "batch_2_up"
            entry = counts.setdefault(layer, {}).setdefault(name, {"calls": 0, "experts": {}})
            entry["calls"] += 1
            for expert in ids:
                entry["experts"][expert] = entry["experts"].get(expert, 0) + 1
        return counts
