"""nemotron_h_moe: no gate, squared ReLU, a shared expert; layers of attention, Mamba-2 or experts, each alone.

The second variant is made as Nemotron 3 Puzzle: every layer of experts has its own hidden size and its own number of
experts per token.
"""

from dataclasses import replace

import gguf
import numpy as np
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

LAYERS = ("attention", "mamba", "experts", "attention", "experts")
SIZES = Sizes(n_layer=len(LAYERS))
SHARED_FF = 128
D_CONV, D_INNER, D_STATE, N_GROUP, N_SSM_HEAD = 4, 256, 64, 2, 4


def nemotron_h_moe(writer, seed: int) -> None:
    add_nemotron(writer, seed, {2: SIZES, 4: SIZES})


def nemotron_h_moe_by_layer(writer, seed: int) -> None:
    add_nemotron(writer, seed, {2: replace(SIZES, n_expert_used=2), 4: replace(SIZES, n_expert_used=5, n_ff=512)})


def add_nemotron(writer, seed: int, moe: dict[int, Sizes]) -> None:
    """`moe`: sizes of each layer that has experts."""
    per_layer = [moe.get(layer, replace(SIZES, n_ff=0, n_expert_used=0)) for layer in range(SIZES.n_layer)]
    n_ff = [sizes.n_ff for sizes in per_layer]
    n_used = [sizes.n_expert_used for sizes in per_layer] if len(set(moe.values())) > 1 else SIZES.n_expert_used
    n_head_kv = [SIZES.n_head_kv if kind == "attention" else 0 for kind in LAYERS]
    add_decoder_keys(writer, SIZES, n_ff=n_ff, n_head_kv=n_head_kv, n_expert_used=n_used)
    writer.add_array(gguf.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH.format(arch=writer.arch), n_ff)
    writer.add_expert_shared_count(1)
    writer.add_expert_shared_feed_forward_length(SHARED_FF)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(2.5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(N_SSM_HEAD)
    writer.add_ssm_group_count(N_GROUP)
    tensors = Tensors(writer, seed)
    add_ends(tensors, SIZES.n_embd)
    for layer, kind in enumerate(LAYERS):
        add_layer(tensors, f"blk.{layer}", kind, per_layer[layer])


def add_layer(tensors: Tensors, block: str, kind: str, sizes: Sizes) -> None:
    if kind == "attention":
        add_attention(tensors, block, sizes)
        return
    tensors.norm(f"{block}.attn_norm.weight", sizes.n_embd)
    if kind == "mamba":
        add_mamba(tensors, block)
        return
    add_router(tensors, block, sizes)
    tensors.vector(f"{block}.exp_probs_b.bias", sizes.n_expert)
    add_experts(tensors, block, sizes, gate=False)
    add_dense_ffn(tensors, block, sizes.n_embd, SHARED_FF, "_shexp", gate=False)


def add_mamba(tensors: Tensors, block: str) -> None:
    n_conv = D_INNER + 2 * N_GROUP * D_STATE
    tensors.matrix(f"{block}.ssm_in.weight", D_INNER + n_conv + N_SSM_HEAD, SIZES.n_embd)
    tensors.matrix(f"{block}.ssm_conv1d.weight", n_conv, D_CONV, dtype=np.float32)
    tensors.vector(f"{block}.ssm_conv1d.bias", n_conv)
    tensors.vector(f"{block}.ssm_dt.bias", N_SSM_HEAD)
    decay = -np.exp(tensors.random.standard_normal((N_SSM_HEAD, 1), dtype=np.float32))  # a state must decay
    tensors.writer.add_tensor(f"{block}.ssm_a", decay)
    tensors.vector(f"{block}.ssm_d", N_SSM_HEAD, 1)
    tensors.norm(f"{block}.ssm_norm.weight", (N_GROUP, D_INNER // N_GROUP))
    tensors.matrix(f"{block}.ssm_out.weight", SIZES.n_embd, D_INNER)
