"""What generated models have in common: random tensors, a byte vocabulary, keys of a decoder, attention, experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import gguf
import numpy as np

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTEXT_LENGTH = 4096


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
        """Values around 1, for norms and scales."""
        values = 1.0 + 0.1 * self.random.standard_normal(size, dtype=np.float32)
        self.writer.add_tensor(name, values.astype(np.float32))

    def vector(self, name: str, *shape: int, std: float = 0.1) -> None:
        """Values around 0, for biases and other small things that stay F32."""
        self.writer.add_tensor(name, self.random.standard_normal(shape, dtype=np.float32) * np.float32(std))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder. Rows of experts are 256 long, so that K-types can hold them."""

    n_layer: int = 3
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 256
    n_expert: int = 8
    n_expert_used: int = 3


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


def add_decoder_keys(writer: gguf.GGUFWriter, sizes: Sizes, **others: int | list[int]) -> None:
    """Keys of a decoder with rotary attention, and its vocabulary; those of the experts come on top.

    `others` replaces sizes by name; `n_ff`, `n_head_kv` and `n_expert_used` may be lists, one value per layer.
    """
    values = asdict(sizes) | {"value_dim": sizes.head_dim} | others
    writer.add_block_count(sizes.n_layer)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(sizes.n_embd)
    writer.add_feed_forward_length(values["n_ff"])
    writer.add_head_count(sizes.n_head)
    writer.add_head_count_kv(values["n_head_kv"])
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(values["value_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(sizes.n_expert)
    add_expert_used_count(writer, values["n_expert_used"])
    add_vocabulary(writer)


def add_expert_used_count(writer: gguf.GGUFWriter, n_used: int | list[int]) -> None:
    if isinstance(n_used, list):
        writer.add_array(gguf.Keys.LLM.EXPERT_USED_COUNT.format(arch=writer.arch), n_used)
    else:
        writer.add_expert_used_count(n_used)


def add_ends(tensors: Tensors, n_embd: int) -> None:
    """Token embeddings, the last norm, the output matrix."""
    tensors.matrix("token_embd.weight", len(vocabulary()), n_embd, gain=n_embd**0.5)
    tensors.norm("output_norm.weight", n_embd)
    tensors.writer.add_tensor("output.weight", output_matrix(tensors.random, n_embd))


def add_attention(tensors: Tensors, block: str, sizes: Sizes, qk_norm: bool = False) -> None:
    """Queries, keys, values, output."""
    n_embd, head_dim = sizes.n_embd, sizes.head_dim
    tensors.norm(f"{block}.attn_norm.weight", n_embd)
    tensors.matrix(f"{block}.attn_q.weight", sizes.n_head * head_dim, n_embd)
    tensors.matrix(f"{block}.attn_k.weight", sizes.n_head_kv * head_dim, n_embd)
    tensors.matrix(f"{block}.attn_v.weight", sizes.n_head_kv * head_dim, n_embd)
    tensors.matrix(f"{block}.attn_output.weight", n_embd, sizes.n_head * head_dim)
    if qk_norm:
        tensors.norm(f"{block}.attn_q_norm.weight", head_dim)
        tensors.norm(f"{block}.attn_k_norm.weight", head_dim)


def add_router(tensors: Tensors, block: str, sizes: Sizes) -> None:
    tensors.matrix(f"{block}.ffn_gate_inp.weight", sizes.n_expert, sizes.n_embd, gain=2.0, dtype=np.float32)


def add_experts(tensors: Tensors, block: str, sizes: Sizes, gate: bool = True) -> None:
    """Gate, up and down of every expert; their hidden size is `n_ff`."""
    n_expert, n_ff, n_embd = sizes.n_expert, sizes.n_ff, sizes.n_embd
    if gate:
        tensors.matrix(f"{block}.ffn_gate_exps.weight", n_expert, n_ff, n_embd, gain=2.0)
    tensors.matrix(f"{block}.ffn_up_exps.weight", n_expert, n_ff, n_embd, gain=2.0)
    tensors.matrix(f"{block}.ffn_down_exps.weight", n_expert, n_embd, n_ff, gain=2.0)


def add_dense_ffn(tensors: Tensors, block: str, n_embd: int, n_ff: int, suffix: str = "", gate: bool = True) -> None:
    """An FFN that every token takes; suffix "_shexp" makes it the shared expert."""
    if gate:
        tensors.matrix(f"{block}.ffn_gate{suffix}.weight", n_ff, n_embd)
    tensors.matrix(f"{block}.ffn_up{suffix}.weight", n_ff, n_embd)
    tensors.matrix(f"{block}.ffn_down{suffix}.weight", n_embd, n_ff)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
