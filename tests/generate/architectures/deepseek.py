"""deepseek2: latent attention, a leading dense layer, experts chosen by group and by a bias, shared experts."""

import gguf
from writer import Sizes, Tensors, add_decoder_keys, add_dense_ffn, add_ends, add_experts, add_router

Q_RANK, KV_RANK = 64, 64
ROPE_DIM, NOPE_DIM, V_DIM = 32, 32, 64
# the cache holds one head: the latent and the rotary part
SIZES = Sizes(n_layer=4, n_head_kv=1, head_dim=KV_RANK + ROPE_DIM)
N_DENSE, N_SHARED = 1, 2
N_GROUPS, N_GROUPS_USED = 4, 2
WEIGHTS_SCALE = 2.5


def deepseek2(writer, seed: int) -> None:
    add_decoder_keys(writer, SIZES, value_dim=KV_RANK)
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_leading_dense_block_count(N_DENSE)
    writer.add_expert_shared_count(N_SHARED)
    writer.add_expert_group_count(N_GROUPS)
    writer.add_expert_group_used_count(N_GROUPS_USED)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(WEIGHTS_SCALE)
    writer.add_q_lora_rank(Q_RANK)
    writer.add_kv_lora_rank(KV_RANK)
    writer.add_key_length_mla(NOPE_DIM + ROPE_DIM)
    writer.add_value_length_mla(V_DIM)
    writer.add_rope_dimension_count(ROPE_DIM)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer in range(SIZES.n_layer):
        block = f"blk.{layer}"
        add_latent_attention(tensors, block)
        tensors.norm(f"{block}.ffn_norm.weight", SIZES.n_embd)
        if layer < N_DENSE:
            add_dense_ffn(tensors, block, SIZES.n_embd, SIZES.n_ff)
        else:
            add_router(tensors, block, SIZES)
            tensors.vector(f"{block}.exp_probs_b.bias", SIZES.n_expert)
            add_experts(tensors, block, SIZES)
            add_dense_ffn(tensors, block, SIZES.n_embd, N_SHARED * SIZES.n_ff, "_shexp")


def add_latent_attention(tensors: Tensors, block: str) -> None:
    n_head, n_embd = SIZES.n_head, SIZES.n_embd
    tensors.norm(f"{block}.attn_norm.weight", n_embd)
    tensors.norm(f"{block}.attn_q_a_norm.weight", Q_RANK)
    tensors.norm(f"{block}.attn_kv_a_norm.weight", KV_RANK)
    tensors.matrix(f"{block}.attn_q_a.weight", Q_RANK, n_embd)
    tensors.matrix(f"{block}.attn_q_b.weight", n_head * (NOPE_DIM + ROPE_DIM), Q_RANK)
    tensors.matrix(f"{block}.attn_kv_a_mqa.weight", KV_RANK + ROPE_DIM, n_embd)
    tensors.matrix(f"{block}.attn_k_b.weight", n_head, KV_RANK, NOPE_DIM)
    tensors.matrix(f"{block}.attn_v_b.weight", n_head, V_DIM, KV_RANK)
    tensors.matrix(f"{block}.attn_output.weight", n_embd, n_head * V_DIM)
