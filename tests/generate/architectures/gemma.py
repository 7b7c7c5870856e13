"""gemma4 with experts: gate and up in one tensor, GELU, a factor per expert behind down, a dense FFN beside."""

from writer import Sizes, Tensors, add_attention, add_decoder_keys, add_dense_ffn, add_ends, add_router

SIZES = Sizes(n_head_kv=4)
DENSE_FF = 128
SLIDING_WINDOW = 32


def gemma4(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES, n_ff=DENSE_FF)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_key_length_swa(SIZES.head_dim)
    writer.add_value_length_swa(SIZES.head_dim)
    writer.add_sliding_window(SLIDING_WINDOW)
    writer.add_sliding_window_pattern([True, True, False])
    writer.add_embedding_length_per_layer_input(0)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    tensors.norm("rope_freqs.weight", SIZES.head_dim // 2)
    for layer in range(SIZES.n_layer):
        add_layer(tensors, f"blk.{layer}")


def add_layer(tensors: Tensors, block: str) -> None:
    n_expert, n_ff, n_embd = SIZES.n_expert, SIZES.n_ff, SIZES.n_embd
    add_attention(tensors, block, SIZES, qk_norm=True)
    for norm in ("post_attention_norm", "ffn_norm", "pre_ffw_norm_2"):
        tensors.norm(f"{block}.{norm}.weight", n_embd)
    for norm in ("post_ffw_norm", "post_ffw_norm_1", "post_ffw_norm_2"):
        tensors.norm(f"{block}.{norm}.weight", n_embd)
    add_dense_ffn(tensors, block, n_embd, DENSE_FF)
    add_router(tensors, block, SIZES)
    tensors.norm(f"{block}.ffn_gate_inp.scale", n_embd)
    tensors.matrix(f"{block}.ffn_gate_up_exps.weight", n_expert, 2 * n_ff, n_embd, gain=2.0)
    tensors.matrix(f"{block}.ffn_down_exps.weight", n_expert, n_embd, n_ff, gain=2.0)
    tensors.norm(f"{block}.ffn_down_exps.scale", n_expert)
