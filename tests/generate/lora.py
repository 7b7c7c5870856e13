"""A random LoRA adapter on the expert matrices (and the queries, where a model has them) of a generated model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from writer import finish

RANK = 8
ADAPTED = ("_exps.weight", "_chexps.weight", "attn_q.weight")


def write_lora(model: Path, path: Path, seed: int) -> None:
    reader = gguf.GGUFReader(model)
    architecture = reader.get_field(gguf.Keys.General.ARCHITECTURE).contents()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(RANK))
    random = np.random.default_rng(seed)
    for tensor in reader.tensors:
        if tensor.name.endswith(ADAPTED):
            n_in, n_out, *n_expert = (int(n) for n in tensor.shape)
            add_pair(writer, random, tensor.name, n_in, n_out, n_expert)
    finish(writer)


def add_pair(writer, random, name: str, n_in: int, n_out: int, n_expert: list[int]) -> None:
    """A `[n_in, rank]` and B `[rank, n_out]` (ggml order), per expert where there are experts."""
    for suffix, shape in (("lora_a", (*n_expert, RANK, n_in)), ("lora_b", (*n_expert, n_out, RANK))):
        values = random.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        writer.add_tensor(f"{name}.{suffix}", values)
