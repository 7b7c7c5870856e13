"""nomic-bert-moe: an encoder without a gate (up, GELU, down) in every second layer; it gives embeddings, no logits."""

import gguf
from writer import CONTEXT_LENGTH, Sizes, Tensors, add_experts, add_router, add_vocabulary, vocabulary

SIZES = Sizes(n_layer=4, n_head_kv=4)
MOE_EVERY_N_LAYERS = 2
N_TOKEN_TYPES = 1


def nomic_bert_moe(writer, seed: int) -> None:
    writer.add_block_count(SIZES.n_layer)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(SIZES.n_embd)
    writer.add_feed_forward_length(SIZES.n_ff)
    writer.add_head_count(SIZES.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_moe_every_n_layers(MOE_EVERY_N_LAYERS)
    writer.add_expert_count(SIZES.n_expert)
    writer.add_expert_used_count(SIZES.n_expert_used)
    add_vocabulary(writer)
    writer.add_token_type_count(N_TOKEN_TYPES)
    tensors = Tensors(writer, seed)
    tensors.matrix("token_embd.weight", len(vocabulary()), SIZES.n_embd, gain=SIZES.n_embd**0.5)
    tensors.vector("token_types.weight", N_TOKEN_TYPES, SIZES.n_embd)
    add_layer_norm(tensors, "token_embd_norm")
    for layer in range(SIZES.n_layer):
        add_layer(tensors, f"blk.{layer}", is_moe=layer % MOE_EVERY_N_LAYERS == 1)


def add_layer_norm(tensors: Tensors, name: str) -> None:
    tensors.norm(f"{name}.weight", SIZES.n_embd)
    tensors.vector(f"{name}.bias", SIZES.n_embd)


def add_layer(tensors: Tensors, block: str, is_moe: bool) -> None:
    n_embd, n_ff = SIZES.n_embd, SIZES.n_ff
    tensors.matrix(f"{block}.attn_qkv.weight", 3 * n_embd, n_embd)
    tensors.matrix(f"{block}.attn_output.weight", n_embd, n_embd)
    add_layer_norm(tensors, f"{block}.attn_output_norm")
    if is_moe:
        add_router(tensors, block, SIZES)
        add_experts(tensors, block, SIZES, gate=False)
    else:
        tensors.matrix(f"{block}.ffn_up.weight", n_ff, n_embd)
        tensors.matrix(f"{block}.ffn_down.weight", n_embd, n_ff)
    add_layer_norm(tensors, f"{block}.layer_output_norm")
