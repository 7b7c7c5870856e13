"""qwen3moe (gate, up, down; with per-expert scales too) and qwen2moe (the same beside a shared expert)."""

from writer import (
    Sizes,
    Tensors,
    add_attention,
    add_decoder_keys,
    add_dense_ffn,
    add_ends,
    add_experts,
    add_router,
)

QWEN3 = Sizes(n_expert=16, n_expert_used=4)
QWEN2 = Sizes(n_head_kv=4)
SHARED_FF = 128
SMALL = Sizes(n_layer=1, n_expert=4, n_expert_used=2)


def qwen3moe(writer, seed: int) -> None:
    add_qwen3moe(writer, seed, QWEN3)


def qwen3moe_small(writer, seed: int) -> None:
    """For many types: some take long to quantize."""
    add_qwen3moe(writer, seed, SMALL)


def qwen3moe_scales(writer, seed: int) -> None:
    """One factor per expert behind each projection, as NVFP4 files have them."""
    add_qwen3moe(writer, seed, QWEN3, scales=True)


def add_qwen3moe(writer, seed: int, sizes: Sizes, scales: bool = False) -> None:
    add_decoder_keys(writer, sizes)
    writer.add_expert_feed_forward_length(sizes.n_ff)
    tensors = Tensors(writer, seed)
    add_ends(tensors, sizes.n_embd)
    for layer in range(sizes.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, sizes, qk_norm=True)
        tensors.norm(f"{block}.ffn_norm.weight", sizes.n_embd)
        add_router(tensors, block, sizes)
        add_experts(tensors, block, sizes)
        if scales:
            for part in ("gate", "up", "down"):
                tensors.norm(f"{block}.ffn_{part}_exps.scale", sizes.n_expert)


def qwen2moe(writer, seed: int) -> None:
    add_decoder_keys(writer, QWEN2)
    writer.add_expert_feed_forward_length(QWEN2.n_ff)
    writer.add_expert_shared_feed_forward_length(SHARED_FF)
    tensors = Tensors(writer, seed)
    add_ends(tensors, QWEN2.n_embd)
    for layer in range(QWEN2.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, QWEN2)
        tensors.norm(f"{block}.ffn_norm.weight", QWEN2.n_embd)
        add_router(tensors, block, QWEN2)
        add_experts(tensors, block, QWEN2)
        tensors.vector(f"{block}.ffn_gate_inp_shexp.weight", QWEN2.n_embd)
        add_dense_ffn(tensors, block, QWEN2.n_embd, SHARED_FF, "_shexp")
