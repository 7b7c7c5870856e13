"""llama4: the router's weights are applied before the FFN, so that x has one column per expert; every second layer.

The published models use one expert per token; the other variant shows what several columns mean.
"""

from dataclasses import replace

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

SIZES = Sizes(n_layer=4)
MOE_EVERY_N_LAYERS = 2


def llama4(writer, seed: int) -> None:
    add_llama4(writer, seed, SIZES)


def llama4_top1(writer, seed: int) -> None:
    add_llama4(writer, seed, replace(SIZES, n_expert_used=1))


def add_llama4(writer, seed: int, sizes: Sizes) -> None:
    add_decoder_keys(writer, sizes)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_interleave_moe_layer_step(MOE_EVERY_N_LAYERS)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, SIZES)
        tensors.norm(f"{block}.ffn_norm.weight", SIZES.n_embd)
        if (layer + 1) % MOE_EVERY_N_LAYERS == 0:
            add_router(tensors, block, SIZES)
            add_experts(tensors, block, SIZES)
            add_dense_ffn(tensors, block, SIZES.n_embd, SIZES.n_ff, "_shexp")
        else:
            add_dense_ffn(tensors, block, SIZES.n_embd, SIZES.n_ff)
