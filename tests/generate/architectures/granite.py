"""granitemoe: gate, up, down, with factors on embeddings, residual and logits, and a shared expert."""

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


def granitemoe(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES)
    writer.add_expert_shared_feed_forward_length(SHARED_FF)
    writer.add_logit_scale(0.5)
    writer.add_residual_scale(0.75)
    writer.add_embedding_scale(2.0)
    writer.add_attention_scale(1.0 / SIZES.head_dim)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, SIZES)
        tensors.norm(f"{block}.ffn_norm.weight", SIZES.n_embd)
        add_router(tensors, block, SIZES)
        add_experts(tensors, block, SIZES)
        add_dense_ffn(tensors, block, SIZES.n_embd, SHARED_FF, "_shexp")
