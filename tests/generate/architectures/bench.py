"""qwen3moe in realistic proportions, for measuring: experts of 0.84 MiB in Q4_K, 12 layers of 64, eight per token; and half
as many layers of that;
and one whose tokens use few of many experts, so that it takes large batches until copying experts pays."""

import dataclasses

from writer import Sizes

from .qwen import add_qwen3moe

SIZES = Sizes(n_layer=12, n_embd=1024, n_head=16, n_head_kv=4, n_ff=512, n_expert=64, n_expert_used=8)


def qwen3moe_bench(writer, seed: int) -> None:
    add_qwen3moe(writer, seed, SIZES)


def qwen3moe_half(writer, seed: int) -> None:
    add_qwen3moe(writer, seed, dataclasses.replace(SIZES, n_layer=SIZES.n_layer // 2))


def qwen3moe_sparse(writer, seed: int) -> None:
    sizes = dataclasses.replace(SIZES, n_layer=3, n_embd=512, n_head=4, n_head_kv=2, n_expert_used=2)
    add_qwen3moe(writer, seed, sizes)
