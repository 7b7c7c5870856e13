"""grovemoe: a second group of smaller "chunk" experts behind the first, two of the first sharing one of the second."""

from writer import Sizes, Tensors, add_attention, add_decoder_keys, add_ends, add_experts, add_router

SIZES = Sizes()
N_PER_GROUP = 2
CHUNK_FF = 256


def grovemoe(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_expert_chunk_feed_forward_length(CHUNK_FF)
    writer.add_experts_per_group(N_PER_GROUP)
    writer.add_expert_group_scale(1.0)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    n_chunk, n_embd = SIZES.n_expert // N_PER_GROUP, SIZES.n_embd
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_attention(tensors, block, SIZES, qk_norm=True)
        tensors.norm(f"{block}.ffn_norm.weight", n_embd)
        add_router(tensors, block, SIZES)
        add_experts(tensors, block, SIZES)
        tensors.matrix(f"{block}.ffn_gate_chexps.weight", n_chunk, CHUNK_FF, n_embd)
        tensors.matrix(f"{block}.ffn_up_chexps.weight", n_chunk, CHUNK_FF, n_embd)
        tensors.matrix(f"{block}.ffn_down_chexps.weight", n_chunk, n_embd, CHUNK_FF)
