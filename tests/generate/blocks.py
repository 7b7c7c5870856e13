"""Random blocks of the types whose quantizer needs long for its tables; every bit pattern of them is a valid one.

Layouts: ggml-common.h, block_iq1_s to block_iq2_xxs. All hold 256 values; what must be sensible is the F16 scale.
"""

from __future__ import annotations

import gguf
import numpy as np

BLOCK_VALUES = 256
# scales that make weights about as large as those of the F16 model
TYPICAL_SCALE = {"IQ1_S": 0.015, "IQ1_M": 0.015, "IQ2_XXS": 0.0025, "IQ2_XS": 0.0025, "IQ2_S": 0.0025}
IQ1_M_SCALES = 48  # where four 16-bit words begin, whose highest four bits make up the scale


class BlockWriter(gguf.GGUFWriter):
    """Writes random blocks in place of the expert matrices that it is given."""

    def __init__(self, path, architecture: str, type_name: str, seed: int):
        super().__init__(path, architecture)
        self.type_name = type_name
        self.random = np.random.default_rng(seed)

    def add_tensor(self, name: str, tensor: np.ndarray, **others) -> None:
        if not name.endswith("exps.weight"):
            super().add_tensor(name, tensor, **others)
            return
        block_type = gguf.GGMLQuantizationType[self.type_name]
        super().add_tensor(name, random_blocks(self.random, self.type_name, tensor.shape), raw_dtype=block_type)


def random_blocks(random: np.random.Generator, type_name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of a tensor of that shape (numpy order)."""
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    assert n_values == BLOCK_VALUES
    *rows, n_in = shape
    blocks = random.integers(0, 256, (*rows, n_in // BLOCK_VALUES, n_bytes), dtype=np.uint8)
    scales = TYPICAL_SCALE[type_name] * random.uniform(0.5, 1.5, blocks.shape[:-1])
    set_scales(blocks, type_name, scales.astype(np.float16).view(np.uint16))
    return blocks.reshape(*rows, -1)


def set_scales(blocks: np.ndarray, type_name: str, bits: np.ndarray) -> None:
    if type_name != "IQ1_M":
        blocks[..., 0], blocks[..., 1] = bits & 0xFF, bits >> 8
        return
    for word in range(4):
        high_byte = blocks[..., IQ1_M_SCALES + 2 * word + 1]
        nibble = ((bits >> (4 * word)) & 0xF).astype(np.uint8)
        high_byte[...] = (high_byte & 0x0F) | (nibble << 4)
