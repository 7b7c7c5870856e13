"""kimi-k3: experts in a smaller space, with an activation of tanh and sigmoid (SiTU) built from five kinds of nodes."""

import gguf
import numpy as np
from writer import Sizes, Tensors, add_decoder_keys, add_dense_ffn, add_ends, add_experts, add_router

from . import deepseek
from .deepseek import KV_RANK, NOPE_DIM, Q_RANK, ROPE_DIM, V_DIM, add_latent_attention

SIZES = deepseek.SIZES
LATENT = 256  # rows of experts; K-types need 256
N_DENSE, N_SHARED = 1, 1
IS_LINEAR = [False, True, False, True]  # Kimi delta attention, or latent attention
LINEAR_DIM, D_CONV = 64, 4
# blocks of which earlier layers' sums are mixed into later ones
RESIDUAL_BLOCK = 12
BETA, LINEAR_BETA = 4.0, 25.0


def kimi_k3(writer, seed: int) -> None:
    n_head_kv = [0 if linear else 1 for linear in IS_LINEAR]
    add_decoder_keys(writer, SIZES, value_dim=KV_RANK, n_head_kv=n_head_kv)
    add_keys(writer)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    tensors.norm("output_res_score.weight", SIZES.n_embd)
    for layer, is_linear in enumerate(IS_LINEAR):
        block = f"blk.{layer}"
        if is_linear:
            add_linear_attention(tensors, block)
        else:
            add_latent_attention(tensors, block)
        for name in ("attn_res_score", "ffn_res_score", "ffn_norm"):
            tensors.norm(f"{block}.{name}.weight", SIZES.n_embd)
        if layer < N_DENSE:
            add_dense_ffn(tensors, block, SIZES.n_embd, SIZES.n_ff)
        else:
            add_latent_experts(tensors, block)


def add_keys(writer) -> None:
    arch = writer.arch
    writer.add_expert_feed_forward_length(SIZES.n_ff)
    writer.add_leading_dense_block_count(N_DENSE)
    writer.add_expert_shared_count(N_SHARED)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_q_lora_rank(Q_RANK)
    writer.add_kv_lora_rank(KV_RANK)
    writer.add_key_length_mla(NOPE_DIM + ROPE_DIM)
    writer.add_value_length_mla(V_DIM)
    writer.add_rope_dimension_count(ROPE_DIM)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_kda_head_dim(LINEAR_DIM)
    writer.add_uint32(f"{arch}.expert_latent_length", LATENT)
    writer.add_uint32(f"{arch}.attn_res.block_size", RESIDUAL_BLOCK)
    writer.add_float32(f"{arch}.activation.situ_beta", BETA)
    writer.add_float32(f"{arch}.activation.situ_linear_beta", LINEAR_BETA)
    writer.add_float32(f"{arch}.kda.gate_lower_bound", -5.0)


def add_latent_experts(tensors: Tensors, block: str) -> None:
    add_router(tensors, block, SIZES)
    tensors.vector(f"{block}.exp_probs_b.bias", SIZES.n_expert)
    tensors.matrix(f"{block}.ffn_routed_down.weight", LATENT, SIZES.n_embd)
    tensors.matrix(f"{block}.ffn_routed_up.weight", SIZES.n_embd, LATENT)
    tensors.norm(f"{block}.ffn_routed_norm.weight", LATENT)
    add_experts(tensors, block, Sizes(n_embd=LATENT, n_ff=SIZES.n_ff, n_expert=SIZES.n_expert))
    add_dense_ffn(tensors, block, SIZES.n_embd, N_SHARED * SIZES.n_ff, "_shexp")


def add_linear_attention(tensors: Tensors, block: str) -> None:
    n_embd, n_inner = SIZES.n_embd, SIZES.n_head * LINEAR_DIM
    tensors.norm(f"{block}.attn_norm.weight", n_embd)
    for part in ("q", "k", "v"):
        tensors.matrix(f"{block}.attn_{part}.weight", n_inner, n_embd)
        tensors.matrix(f"{block}.ssm_conv1d_{part}.weight", 1, n_inner, 1, D_CONV, dtype=np.float32)
    tensors.matrix(f"{block}.ssm_f_a.weight", LINEAR_DIM, n_embd)
    tensors.matrix(f"{block}.ssm_f_b.weight", n_inner, LINEAR_DIM)
    tensors.matrix(f"{block}.ssm_beta.weight", SIZES.n_head, n_embd)
    tensors.matrix(f"{block}.ssm_g.weight", n_inner, n_embd)
    tensors.vector(f"{block}.ssm_a", SIZES.n_head)
    tensors.vector(f"{block}.ssm_dt.bias", n_inner)
    tensors.norm(f"{block}.ssm_norm.weight", LINEAR_DIM)
    tensors.matrix(f"{block}.attn_output.weight", n_embd, n_inner)
