"""gpt-oss: gate, up and down with a bias per expert, a clamped GLU of its own, attention sinks."""

from writer import Sizes, Tensors, add_attention, add_decoder_keys, add_ends, add_experts, add_router

SIZES = Sizes()
SLIDING_WINDOW = 32


def gpt_oss(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_sliding_window(SLIDING_WINDOW)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, SIZES)
        tensors.vector(f"{block}.attn_output.bias", SIZES.n_embd)
        tensors.vector(f"{block}.attn_sinks.weight", SIZES.n_head)
        tensors.norm(f"{block}.post_attention_norm.weight", SIZES.n_embd)
        add_router(tensors, block, SIZES)
        tensors.vector(f"{block}.ffn_gate_inp.bias", SIZES.n_expert)
        add_experts(tensors, block, SIZES)
        for part, n_out in (("gate", SIZES.n_ff), ("up", SIZES.n_ff), ("down", SIZES.n_embd)):
            tensors.vector(f"{block}.ffn_{part}_exps.bias", SIZES.n_expert, n_out, std=0.5)
