"""Small random-weight MoE models for tests, the same bytes from the same seed.

`python tests/generate/models.py` writes all of them to build/tests/models; tests call `generated()`, which makes
one when it is first wanted. F16 is written here, other types come from llama-quantize. A further architecture is
one function that adds its keys and tensors to a writer, and one line in ARCHITECTURES.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
LLAMA_QUANTIZE = REPOSITORY / "build/stock/bin/llama-quantize"
MODELS = REPOSITORY / "build/tests/models"

QUANTIZED = ["Q4_0", "Q4_K", "Q6_K", "Q8_0"]
SPLIT_MAX_TENSORS = 14  # 39 tensors: three files
SEED = 1
QUANTIZE_TIMEOUT_S = 120

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


class Tensors:
    """Adds tensors of normally distributed values to a writer; shapes in numpy order (rows first)."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int):
        self.writer = writer
        self.random = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, gain: float = 1.0, dtype: type = np.float16) -> None:
        """A weight whose output has about `gain` times the size of its input (std = gain / sqrt(row length))."""
        values = self.random.standard_normal(shape, dtype=np.float32) * (gain / shape[-1] ** 0.5)
        self.writer.add_tensor(name, values.astype(dtype))

    def norm(self, name: str, size: int) -> None:
        values = 1.0 + 0.1 * self.random.standard_normal(size, dtype=np.float32)
        self.writer.add_tensor(name, values.astype(np.float32))


def byte_tokens() -> list[str]:
    """The 256 byte-level tokens of a GPT-2 vocabulary: printable bytes as themselves, others from U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def vocabulary() -> list[str]:
    return [*byte_tokens(), "\u0120t", *SPECIAL_TOKENS]  # one merge, since the loader wants some


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    n_special = len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - n_special) + [gguf.TokenType.CONTROL] * n_special)
    writer.add_token_merges(["\u0120 t"])
    writer.add_bos_token_id(len(tokens) - n_special)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def output_matrix(random: np.random.Generator, n_embd: int) -> np.ndarray:
    """Rows of printable ASCII only; the others are 0 and never win, so that greedy text is text and never ends."""
    tokens = vocabulary()
    rows = random.standard_normal((len(tokens), n_embd), dtype=np.float32) * (3.0 / n_embd**0.5)
    printable = [len(token) == 1 and token.isascii() for token in tokens]
    return np.where(np.array(printable)[:, None], rows, 0.0).astype(np.float16)


def qwen3moe(writer: gguf.GGUFWriter, seed: int) -> None:
    n_layer, n_embd, n_head, n_head_kv, head_dim = 3, 256, 4, 2, 64
    n_expert, n_expert_used, n_ff_exp = 16, 4, 256  # rows of 256: K-types need it

    writer.add_block_count(n_layer)
    writer.add_context_length(4096)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff_exp)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(n_expert_used)
    writer.add_expert_feed_forward_length(n_ff_exp)
    add_vocabulary(writer)

    tensors = Tensors(writer, seed)
    tensors.matrix("token_embd.weight", len(vocabulary()), n_embd, gain=n_embd**0.5)
    tensors.norm("output_norm.weight", n_embd)
    writer.add_tensor("output.weight", output_matrix(tensors.random, n_embd))
    for layer in range(n_layer):
        block = f"blk.{layer}"
        tensors.norm(f"{block}.attn_norm.weight", n_embd)
        tensors.matrix(f"{block}.attn_q.weight", n_head * head_dim, n_embd)
        tensors.matrix(f"{block}.attn_k.weight", n_head_kv * head_dim, n_embd)
        tensors.matrix(f"{block}.attn_v.weight", n_head_kv * head_dim, n_embd)
        tensors.matrix(f"{block}.attn_output.weight", n_embd, n_head * head_dim)
        tensors.norm(f"{block}.attn_q_norm.weight", head_dim)
        tensors.norm(f"{block}.attn_k_norm.weight", head_dim)
        tensors.norm(f"{block}.ffn_norm.weight", n_embd)
        tensors.matrix(f"{block}.ffn_gate_inp.weight", n_expert, n_embd, gain=2.0, dtype=np.float32)
        tensors.matrix(f"{block}.ffn_gate_exps.weight", n_expert, n_ff_exp, n_embd, gain=2.0)
        tensors.matrix(f"{block}.ffn_up_exps.weight", n_expert, n_ff_exp, n_embd, gain=2.0)
        tensors.matrix(f"{block}.ffn_down_exps.weight", n_expert, n_embd, n_ff_exp, gain=2.0)


ARCHITECTURES: dict[str, Callable[[gguf.GGUFWriter, int], None]] = {"qwen3moe": qwen3moe}


def write_f16(architecture: str, path: Path, split_max_tensors: int = 0) -> None:
    """Writes `path`, or, when split, files named as llama.cpp wants them beside it."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    writer.add_name(f"random {architecture}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    ARCHITECTURES[architecture](writer, SEED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, path: Path, type_name: str) -> None:
    command = [str(LLAMA_QUANTIZE), "--pure", str(source), str(path), type_name, "2"]
    environment = {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
    subprocess.run(command, env=environment, check=True, timeout=QUANTIZE_TIMEOUT_S, stdout=subprocess.DEVNULL)


def cache_folder() -> Path:
    """The folder for what this very script makes; what another version of it made is removed."""
    folder = MODELS / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    for other in MODELS.iterdir():
        if other.is_dir() and other != folder:
            shutil.rmtree(other)
    return folder


def make(folder: Path, architecture: str, variant: str) -> Path:
    path = folder / f"{architecture}-{variant}.gguf"
    if variant == "split":
        first = folder / f"{architecture}-{variant}-00001-of-00003.gguf"
        if not first.exists():
            write_f16(architecture, path, SPLIT_MAX_TENSORS)
        return first
    if path.exists():
        return path
    partial = folder / f"partial-{path.name}"
    if variant == "F16":
        write_f16(architecture, partial)
    else:
        quantize(make(folder, architecture, "F16"), partial, variant)
    partial.rename(path)
    return path


def generated(variant: str, architecture: str = "qwen3moe") -> Path:
    """The model of that variant: "F16", one of QUANTIZED, or "split" (F16 in three files; the first is returned)."""
    folder = cache_folder()
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return make(folder, architecture, variant)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for architecture in ARCHITECTURES:
        for variant in ["F16", *QUANTIZED, "split"]:
            path = generated(variant, architecture)
            print(f"{path.relative_to(REPOSITORY)}  {path.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
