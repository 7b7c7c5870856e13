"""The architectures that can be generated: under which name tests ask for each, llama.cpp's name, and who writes it."""

from collections.abc import Callable
from dataclasses import dataclass

from . import bench, deepseek, gemma, granite, grove, kimi, llama4, nemotron, nomic, openai, qwen, step


@dataclass(frozen=True)
class Architecture:
    """`add(writer, seed)` adds keys and tensors to a writer of llama.cpp's architecture `name`."""

    name: str
    add: Callable


ARCHITECTURES = {
    "qwen3moe": Architecture("qwen3moe", qwen.qwen3moe),
    "qwen3moe-scales": Architecture("qwen3moe", qwen.qwen3moe_scales),
    "qwen3moe-small": Architecture("qwen3moe", qwen.qwen3moe_small),
    "qwen3moe-bench": Architecture("qwen3moe", bench.qwen3moe_bench),
    "qwen3moe-bench-half": Architecture("qwen3moe", bench.qwen3moe_half),
    "qwen3moe-bench-sparse": Architecture("qwen3moe", bench.qwen3moe_sparse),
    "qwen2moe": Architecture("qwen2moe", qwen.qwen2moe),
    "gpt-oss": Architecture("gpt-oss", openai.gpt_oss),
    "gemma4": Architecture("gemma4", gemma.gemma4),
    "llama4": Architecture("llama4", llama4.llama4),
    "llama4-top1": Architecture("llama4", llama4.llama4_top1),
    "deepseek2": Architecture("deepseek2", deepseek.deepseek2),
    "granitemoe": Architecture("granitemoe", granite.granitemoe),
    "grovemoe": Architecture("grovemoe", grove.grovemoe),
    "nomic-bert-moe": Architecture("nomic-bert-moe", nomic.nomic_bert_moe),
    "nemotron_h_moe": Architecture("nemotron_h_moe", nemotron.nemotron_h_moe),
    "nemotron_h_moe-by-layer": Architecture("nemotron_h_moe", nemotron.nemotron_h_moe_by_layer),
    "step35": Architecture("step35", step.step35),
    "kimi-k3": Architecture("kimi-k3", kimi.kimi_k3),
    "maple": Architecture("maple", step.maple),
}
