"""Every shape of expert FFN that llama.cpp builds: which generated model has it and how its splits must look."""

from dataclasses import dataclass

from models import generated

# Operations of one split in execution order, as the scheduler prints them (10 characters at most, views left out).
M = "MUL_MAT_ID"
SCALED = [M, "REPEAT", "GET_ROWS", "MUL"]
ADAPTED = [M, M, M, "SCALE", "ADD"]
BIASED = [M, "ADD_ID"]
SWIGLU = [M, M, "SWIGLU", M]
LIMITED = [M, "SILU", "CLAMP", M, "CLAMP", "MUL", M]
SITU = [M, "SCALE", "TANH", "SCALE", "SIGMOID", "MUL", M, "SCALE", "TANH", "SCALE", "MUL", M]


@dataclass(frozen=True)
class Shape:
    """`splits`: operations of every split of ours in a graph; one per layer, if nothing else is said."""

    architecture: str
    layers: list[int]
    splits: list[list[str]]
    block: str = "gate_up_down"
    lora: bool = False
    n_expert_used: tuple = ()  # by layer, where it differs

    @property
    def is_encoder(self) -> bool:
        return self.architecture == "nomic-bert-moe"

    @property
    def options(self) -> dict:
        """Options of moe-probe."""
        lora = {"lora": str(generated("lora", self.architecture))} if self.lora else {}
        return lora | ({"embeddings": True} if self.is_encoder else {})


FIRST_THREE = [0, 1, 2]
FIRST_MOE = [1, 2, 3]  # layer 0 is dense
ADAPTED_SWIGLU = [*ADAPTED, *ADAPTED, "SWIGLU", *ADAPTED]

SHAPES = {
    "qwen3moe": Shape("qwen3moe", FIRST_THREE, 3 * [SWIGLU]),
    "qwen2moe": Shape("qwen2moe", FIRST_THREE, 3 * [SWIGLU]),
    "granitemoe": Shape("granitemoe", FIRST_THREE, 3 * [SWIGLU]),
    "deepseek2": Shape("deepseek2", FIRST_MOE, 3 * [SWIGLU]),
    "llama4": Shape("llama4", [1, 3], 2 * [SWIGLU]),
    "llama4-top1": Shape("llama4-top1", [1, 3], 2 * [SWIGLU]),
    # Two groups of experts in a layer, the second computed from the sum of the first: two splits.
    "grovemoe": Shape("grovemoe", FIRST_THREE, 6 * [SWIGLU]),
    "gpt-oss": Shape("gpt-oss", FIRST_THREE, 3 * [[*BIASED, *BIASED, "SWIGLU_OAI", *BIASED]]),
    "gemma4": Shape("gemma4", FIRST_THREE, 3 * [[M, "GEGLU", *SCALED]], block="fused_gate_up_down"),
    "nomic-bert-moe": Shape("nomic-bert-moe", [1, 3], 2 * [[M, "GELU", M]], block="up_down"),
    "nemotron_h_moe": Shape("nemotron_h_moe", [2, 4], 2 * [[M, "RELU", "SQR", M]], block="up_down"),
    "nemotron_h_moe-by-layer": Shape(
        "nemotron_h_moe-by-layer", [2, 4], 2 * [[M, "RELU", "SQR", M]], block="up_down", n_expert_used=(2, 5)
    ),
    "step35": Shape("step35", FIRST_THREE, [LIMITED, SWIGLU, LIMITED]),
    "kimi-k3": Shape("kimi-k3", FIRST_MOE, 3 * [SITU]),
    "maple": Shape("maple", FIRST_THREE, [[M, M, "SWIGLU_CLA", M], SWIGLU, [M, M, "SWIGLU_CLA", M]]),
    "qwen3moe-scales": Shape("qwen3moe-scales", FIRST_THREE, 3 * [[*SCALED, *SCALED, "SWIGLU", *SCALED]]),
    "qwen3moe+lora": Shape("qwen3moe", FIRST_THREE, 3 * [ADAPTED_SWIGLU], lora=True),
    "gemma4+lora": Shape(
        "gemma4",
        FIRST_THREE,
        3 * [[*ADAPTED, "GEGLU", *SCALED, M, M, "SCALE", "ADD"]],
        block="fused_gate_up_down",
        lora=True,
    ),
    "gpt-oss+lora": Shape(
        "gpt-oss",
        FIRST_THREE,
        3 * [[*ADAPTED, "ADD_ID", *ADAPTED, "ADD_ID", "SWIGLU_OAI", *ADAPTED, "ADD_ID"]],
        lora=True,
    ),
    "nomic-bert-moe+lora": Shape(
        "nomic-bert-moe", [1, 3], 2 * [[*ADAPTED, "GELU", *ADAPTED]], block="up_down", lora=True
    ),
}
