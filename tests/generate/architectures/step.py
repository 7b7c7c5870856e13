"""SwiGLU with limits: step35 builds it from CLAMP, SILU, CLAMP and MUL (one layer has no limit), maple as one GLU."""

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

SIZES = Sizes()
SHARED_FF = 128
SLIDING_WINDOW = 32
LIMITS = [0.5, 0.0, 0.5]  # low, so that many values meet them


def step35(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_expert_shared_feed_forward_length(SHARED_FF)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_sliding_window_pattern([True, False, True])
    writer.add_swiglu_clamp_exp(LIMITS)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, SIZES, qk_norm=True)
        tensors.norm(f"{block}.ffn_norm.weight", SIZES.n_embd)
        add_router(tensors, block, SIZES)
        tensors.vector(f"{block}.exp_probs_b.bias", SIZES.n_expert)
        add_experts(tensors, block, SIZES)
        add_dense_ffn(tensors, block, SIZES.n_embd, SHARED_FF, "_shexp")


def maple(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_sliding_window_pattern([True, False, True])
    writer.add_swiglu_clamp_exp(LIMITS)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, SIZES, qk_norm=True)
        tensors.norm(f"{block}.ffn_norm.weight", SIZES.n_embd)
        add_router(tensors, block, SIZES)
        add_experts(tensors, block, SIZES)
