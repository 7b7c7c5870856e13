"""Models of random weights in GGUF, made on the spot: one to measure with, of as many layers as are wanted, and small ones,
one for each type.

They are qwen3moe: attention, then experts that a router chooses by a softmax over all. Routing of random weights alone is
like dice; texts are not. Two things make it skewed and locally repetitive, and both reach the router as they do in real models,
through its input:

- All token embeddings have a part in common, so that the router always sees some of the same: some experts are asked more
  often (skew).
- Queries and keys have the same weights, so that a token's attention is highest where the positions are near: with the
  frequencies of rotary positions that falls off with a power of the distance. What attention adds is a mean over recent
  tokens, which changes little from one token to the next, whatever they are: so do the experts chosen (repetition).

`MIX` says how much of each; it was chosen so that hit rates lie near those of real traces (docs/benchmarks.md)."""

import math
import multiprocessing
import os
import random
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from device.tensors import TYPES, floats, random_bytes

ALIGNMENT = 32
GGUF_MAGIC, GGUF_VERSION = b"GGUF", 3
GGUF_U32, GGUF_F32, GGUF_BOOL, GGUF_STRING, GGUF_ARRAY, GGUF_I32 = 4, 6, 7, 8, 9, 5
CHUNK_BYTES = 8 << 20
CONTEXT_LENGTH = 32768
ROPE_BASE = 10000.0
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Mix:
    """What the router sees. `common`: the share of an embedding that all have in common; `attention`, `experts`: how large
    what they add is, beside an embedding; `nearness`: the larger, the nearer the tokens that attention means."""

    common: float
    attention: float
    experts: float
    nearness: float


@dataclass(frozen=True)
class Sizes:
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    type_name: str = "Q4_K"

    @property
    def expert_bytes(self) -> int:
        """Of one expert: gate, up, down."""
        kind = TYPES[self.type_name]
        return 2 * self.n_ff * kind.row_bytes(self.n_embd) + self.n_embd * kind.row_bytes(self.n_ff)

    @property
    def all_expert_bytes(self) -> int:
        return self.n_layer * self.n_expert * self.expert_bytes


MIX = Mix(common=0.45, attention=2.0, experts=0.15, nearness=0.95)
# Those of Qwen3-30B-A3B, which has 48 layers of it.
LARGE = Sizes(n_layer=12, n_embd=2048, n_head=32, n_head_kv=4, head_dim=128, n_ff=768, n_expert=128, n_expert_used=8)
# For trying this script without a GPU.
SMALL = Sizes(n_layer=4, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff=256, n_expert=32, n_expert_used=4)
ONE_LAYER = Sizes(n_layer=1, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff=256, n_expert=16, n_expert_used=4)
ROUTER_GAIN = 2.0
EXPERT_GAIN = 2.0


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value) -> bytes:
    """With its type before it."""
    if isinstance(value, bool):
        return struct.pack("<IB", GGUF_BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", GGUF_U32, value)
    if isinstance(value, float):
        return struct.pack("<If", GGUF_F32, value)
    if isinstance(value, str):
        return struct.pack("<I", GGUF_STRING) + gguf_string(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", GGUF_ARRAY, GGUF_STRING, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack("<IIQ", GGUF_ARRAY, GGUF_I32, len(value)) + struct.pack(f"<{len(value)}i", *value)


@dataclass
class Tensor:
    """`shape` in ggml's order, rows first. Either its bytes, or a size and a seed for random ones."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    size: float = 0
    seed: int = 0
    content: bytes | None = None
    repeats: int = 1  # so many times each `repeated` rows, one after the other
    repeated: int = 0
    offset: int = field(default=0)

    @property
    def n_bytes(self) -> int:
        return TYPES[self.type_name].row_bytes(self.shape[0]) * math.prod(self.shape[1:])

    def header(self) -> bytes:
        shape = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        return (
            gguf_string(self.name)
            + struct.pack("<I", len(self.shape))
            + shape
            + struct.pack("<IQ", TYPES[self.type_name].number, self.offset)
        )

    def write(self, file: int, start: int) -> None:
        if self.content is not None:
            os.pwrite(file, self.content, start)
            return
        row_bytes, n_rows = TYPES[self.type_name].row_bytes(self.shape[0]), math.prod(self.shape[1:])
        if self.repeats > 1:
            os.pwrite(file, self._repeated_rows(n_rows), start)
            return
        rows = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, n_rows, rows):
            n = min(rows, n_rows - first) * self.shape[0]
            os.pwrite(file, random_bytes(self.type_name, n, self.size, self.seed + first), start + first * row_bytes)

    def _repeated_rows(self, n_rows: int) -> bytes:
        block_bytes = TYPES[self.type_name].row_bytes(self.shape[0]) * self.repeated
        once = random_bytes(self.type_name, n_rows // self.repeats * self.shape[0], self.size, self.seed)
        blocks = (once[at : at + block_bytes] for at in range(0, len(once), block_bytes))
        return b"".join(block * self.repeats for block in blocks)


def byte_tokens() -> list[str]:
    """The 256 byte-level tokens of a GPT-2 vocabulary: printable bytes as themselves, others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


TOKENS = [*byte_tokens(), "\u0120t", "<|endoftext|>"]
NORMAL, CONTROL = 1, 3


def keys(sizes: Sizes) -> dict:
    of_model = {
        "block_count": sizes.n_layer,
        "context_length": CONTEXT_LENGTH,
        "embedding_length": sizes.n_embd,
        "feed_forward_length": sizes.n_ff,
        "expert_feed_forward_length": sizes.n_ff,
        "expert_count": sizes.n_expert,
        "expert_used_count": sizes.n_expert_used,
        "attention.head_count": sizes.n_head,
        "attention.head_count_kv": sizes.n_head_kv,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "rope.freq_base": ROPE_BASE,
    }
    return {
        "general.architecture": "qwen3moe",
        "general.name": "random weights",
        **{f"qwen3moe.{name}": value for name, value in of_model.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [NORMAL] * (len(TOKENS) - 1) + [CONTROL],
        "tokenizer.ggml.merges": ["\u0120 t"],
        "tokenizer.ggml.bos_token_id": len(TOKENS) - 1,
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def embeddings(sizes: Sizes, mix: Mix, chooser: random.Random) -> bytes:
    """Of length 1 per value: a part in common and one of their own."""
    common = [chooser.gauss(0, math.sqrt(mix.common)) for _ in range(sizes.n_embd)]
    own = math.sqrt(1 - mix.common)
    return floats([both + chooser.gauss(0, own) for _ in TOKENS for both in common])


def output_rows(sizes: Sizes, chooser: random.Random) -> bytes:
    """Printable tokens only: the others are 0 and never win, so that what is generated is text and does not end."""
    size = 3 / math.sqrt(sizes.n_embd)
    printable = [len(token) == 1 and token.isascii() for token in TOKENS]
    return floats(
        [chooser.gauss(0, size) if is_printable else 0.0 for is_printable in printable for _ in range(sizes.n_embd)]
    )


def tensors_of(sizes: Sizes, mix: Mix, seed: int) -> list[Tensor]:
    chooser = random.Random(seed)
    n_embd, heads, keys_of_heads = sizes.n_embd, sizes.n_head * sizes.head_dim, sizes.n_head_kv * sizes.head_dim

    def ones(name: str, n: int, value: float = 1.0) -> Tensor:
        return Tensor(name, "F32", (n,), content=floats([value] * n))

    def matrix(name: str, type_name: str, *shape: int, gain: float = 1.0, **others) -> Tensor:
        made = {"seed": chooser.getrandbits(60), **others}
        return Tensor(name, type_name, shape, size=gain / math.sqrt(shape[0]), **made)

    tensors = [
        Tensor("token_embd.weight", "F32", (n_embd, len(TOKENS)), content=embeddings(sizes, mix, chooser)),
        ones("output_norm.weight", n_embd),
        Tensor("output.weight", "F32", (n_embd, len(TOKENS)), content=output_rows(sizes, chooser)),
    ]
    experts = {"gate": (n_embd, sizes.n_ff), "up": (n_embd, sizes.n_ff), "down": (sizes.n_ff, n_embd)}
    gains = {"gate": EXPERT_GAIN, "up": EXPERT_GAIN, "down": mix.experts}
    for layer in range(sizes.n_layer):
        block = f"blk.{layer}"
        same = chooser.getrandbits(60)
        per_key = {"repeats": sizes.n_head // sizes.n_head_kv, "repeated": sizes.head_dim}
        tensors += [
            ones(f"{block}.attn_norm.weight", n_embd),
            matrix(f"{block}.attn_q.weight", "Q8_0", n_embd, heads, seed=same, **per_key),
            matrix(f"{block}.attn_k.weight", "Q8_0", n_embd, keys_of_heads, seed=same),
            matrix(f"{block}.attn_v.weight", "Q8_0", n_embd, keys_of_heads),
            matrix(f"{block}.attn_output.weight", "Q8_0", heads, n_embd, gain=mix.attention),
            ones(f"{block}.attn_q_norm.weight", sizes.head_dim, mix.nearness),
            ones(f"{block}.attn_k_norm.weight", sizes.head_dim, mix.nearness),
            ones(f"{block}.ffn_norm.weight", n_embd),
            matrix(f"{block}.ffn_gate_inp.weight", "F32", n_embd, sizes.n_expert, gain=ROUTER_GAIN),
        ]
        for part, shape in experts.items():
            tensors.append(
                matrix(f"{block}.ffn_{part}_exps.weight", sizes.type_name, *shape, sizes.n_expert, gain=gains[part])
            )
    return tensors


def write_model(path: Path, sizes: Sizes, mix: Mix = MIX, seed: int = 1, end: float = math.inf) -> None:
    """The same bytes from the same seed. As many processes write as there are processors. It raises TimeoutError if it is not
    done at `end`, of time.monotonic; a small model is written whole."""
    tensors = tensors_of(sizes, mix, seed)
    offset = 0
    for tensor in tensors:
        tensor.offset = offset
        offset += -(-tensor.n_bytes // ALIGNMENT) * ALIGNMENT
    pairs = keys(sizes)
    head = GGUF_MAGIC + struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(pairs))
    head += b"".join(gguf_string(key) + gguf_value(value) for key, value in pairs.items())
    head += b"".join(tensor.header() for tensor in tensors)
    head += bytes(-len(head) % ALIGNMENT)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(file, len(head) + offset)
        os.pwrite(file, head, 0)
        jobs = [(file, tensor, len(head) + tensor.offset) for tensor in tensors]
        if offset < CHUNK_BYTES:
            for job in jobs:
                _write(job)
        else:
            # The file's number is the same in processes that are forked.
            with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
                written = pool.map_async(_write, jobs, chunksize=1)
                written.wait(None if end == math.inf else max(0, end - time.monotonic()))
                if not written.ready():
                    raise TimeoutError
                written.get()
    finally:
        os.close(file)


def _write(job: tuple[int, Tensor, int]) -> None:
    file, tensor, start = job
    tensor.write(file, start)
