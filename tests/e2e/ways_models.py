"""Models that only the tests of the ways in need: one large enough to weigh, and one with a tensor that is read on
demand."""

from pathlib import Path

import gguf

import paths  # noqa: F401  (makes the generator's modules importable)
from architectures import gemma
from writer import (
    Sizes,
    Tensors,
    add_attention,
    add_decoder_keys,
    add_ends,
    add_experts,
    add_router,
    finish,
    vocabulary,
)

SEED = 1
LARGE = Sizes(n_expert=48, n_expert_used=4, n_ff=512)
EMBD_PER_LAYER = 256


def large_qwen3moe(path: Path, sizes: Sizes = LARGE) -> Path:
    """F16; 113 MB of experts in three layers, if no sizes are given."""
    writer = _writer(path, "qwen3moe")
    add_decoder_keys(writer, sizes)
    writer.add_expert_feed_forward_length(sizes.n_ff)
    tensors = Tensors(writer, SEED)
    add_ends(tensors, sizes.n_embd)
    for layer in range(sizes.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, sizes, qk_norm=True)
        tensors.norm(f"{block}.ffn_norm.weight", sizes.n_embd)
        add_router(tensors, block, sizes)
        add_experts(tensors, block, sizes)
    finish(writer)
    return path


def lazy_gemma4(path: Path) -> Path:
    """F16, with per-layer token embeddings, which `--lazy-mode on` leaves on disk."""
    sizes = gemma.SIZES
    writer = _writer(path, "gemma4")
    add_decoder_keys(writer, sizes, n_ff=gemma.DENSE_FF)
    writer.add_expert_feed_forward_length(sizes.n_ff)
    writer.add_key_length_swa(sizes.head_dim)
    writer.add_value_length_swa(sizes.head_dim)
    writer.add_sliding_window(gemma.SLIDING_WINDOW)
    writer.add_sliding_window_pattern([True, True, False])
    writer.add_embedding_length_per_layer_input(EMBD_PER_LAYER)
    tensors = Tensors(writer, SEED)
    add_ends(tensors, sizes.n_embd)
    tensors.norm("rope_freqs.weight", sizes.head_dim // 2)
    n_all_layers = EMBD_PER_LAYER * sizes.n_layer
    n_vocab = len(vocabulary())
    tensors.matrix("per_layer_token_embd.weight", n_vocab, n_all_layers, gain=n_all_layers**0.5)
    tensors.matrix("per_layer_model_proj.weight", n_all_layers, sizes.n_embd)
    tensors.norm("per_layer_proj_norm.weight", EMBD_PER_LAYER)
    for layer in range(sizes.n_layer):
        block = f"blk.{layer}"
        gemma.add_layer(tensors, block)
        tensors.matrix(f"{block}.inp_gate.weight", EMBD_PER_LAYER, sizes.n_embd)
        tensors.matrix(f"{block}.proj.weight", sizes.n_embd, EMBD_PER_LAYER)
        tensors.norm(f"{block}.post_norm.weight", sizes.n_embd)
    finish(writer)
    return path


def _writer(path: Path, architecture: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    return writer
