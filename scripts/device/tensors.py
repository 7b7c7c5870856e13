"""Random weights in every type that ggml multiplies, as bytes: random ones, and scales put in so that the weights have the
size that is asked for. Layouts are those of ggml-common.h. Many bytes a second, since nothing is done value by value."""

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

# A few bytes of every block, put in after the random ones: (offset, bytes), given the size of weights.
Fields = Callable[[float], list[tuple[int, bytes]]]


@dataclass(frozen=True)
class Type:
    """A ggml type: its number, how many weights and bytes a block has, and which bytes are not random."""

    number: int
    weights: int
    bytes: int
    fields: Fields | None  # None: plain floats

    def row_bytes(self, n: int) -> int:
        assert n % self.weights == 0, f"{n} weights in blocks of {self.weights}"
        return n // self.weights * self.bytes


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def scale(offset: int, spread: float) -> Fields:
    """One scale; `spread`: how large weights are for a scale of 1."""
    return lambda size: [(offset, half(size / spread))]


def scale_and_least(offset: int, spread: float, least: float) -> Fields:
    """A scale and what is added to weights (or taken from them) so that they lie around 0, as a multiple of it."""
    return lambda size: [(offset, half(size / spread)), (offset + 2, half(size / spread * least))]


def nibbles_of_scale(size: float) -> list[tuple[int, bytes]]:
    """IQ1_M: a nibble in each of four words; the rest of these bytes are scales of their own."""
    (bits,) = struct.unpack("<H", half(size / 8.3))
    return [(49 + 2 * word, bytes([((bits >> (4 * word)) & 0xF) << 4 | 0x5])) for word in range(4)]


def exponent(size: float) -> list[tuple[int, bytes]]:
    """MXFP4: a power of two."""
    return [(0, bytes([127 + round(math.log2(size / 3.1))]))]


def small_floats(size: float) -> list[tuple[int, bytes]]:
    """NVFP4: four floats of 8 bits, of which powers of two are used here."""
    return [(0, bytes([max(1, 7 + 1 + round(math.log2(size / 6.2))) << 3] * 4))]


TYPES = {
    "F32": Type(0, 1, 4, None),
    "F16": Type(1, 1, 2, None),
    "BF16": Type(30, 1, 2, None),
    "Q1_0": Type(41, 128, 18, scale(0, 1)),
    "Q2_0": Type(42, 64, 18, scale(0, 1.2)),
    "Q4_0": Type(2, 32, 18, scale(0, 4.6)),
    "Q4_1": Type(3, 32, 20, scale_and_least(0, 4.6, -7.5)),
    "Q5_0": Type(6, 32, 22, scale(0, 9.2)),
    "Q5_1": Type(7, 32, 24, scale_and_least(0, 9.2, -15.5)),
    "Q8_0": Type(8, 32, 34, scale(0, 74)),
    "Q2_K": Type(10, 256, 84, scale_and_least(80, 13.9, 1.5)),
    "Q3_K": Type(11, 256, 110, scale(108, 43)),
    "Q4_K": Type(12, 256, 144, scale_and_least(0, 257, 7.5)),
    "Q5_K": Type(13, 256, 176, scale_and_least(0, 524, 15.5)),
    "Q6_K": Type(14, 256, 210, scale(208, 1367)),
    "IQ1_S": Type(19, 256, 50, scale(0, 8.3)),
    "IQ1_M": Type(29, 256, 56, nibbles_of_scale),
    "IQ2_XXS": Type(16, 256, 66, scale(0, 50)),
    "IQ2_XS": Type(17, 256, 74, scale(0, 50)),
    "IQ2_S": Type(22, 256, 82, scale(0, 50)),
    "IQ3_XXS": Type(18, 256, 98, scale(0, 140)),
    "IQ3_S": Type(21, 256, 110, scale(0, 150)),
    "IQ4_NL": Type(20, 32, 18, scale(0, 72)),
    "IQ4_XS": Type(23, 256, 136, scale(0, 1330)),
    "TQ1_0": Type(34, 256, 54, scale(52, 0.8)),
    "TQ2_0": Type(35, 256, 66, scale(64, 1.1)),
    "MXFP4": Type(39, 32, 17, exponent),
    "NVFP4": Type(40, 64, 36, small_floats),
}


def random_bytes(name: str, n: int, size: float, seed: int) -> bytes:
    """`n` weights of that type, the same from the same seed; `size`: their standard deviation, roughly."""
    kind = TYPES[name]
    data = bytearray(random.Random(seed).randbytes(kind.row_bytes(n)))
    if kind.fields is None:
        return as_floats(name, data, size)
    for offset, field in kind.fields(size):
        for at, byte in enumerate(field):
            data[offset + at :: kind.bytes] = bytes([byte]) * (len(data) // kind.bytes)
    return bytes(data)


def as_floats(name: str, data: bytearray, size: float) -> bytes:
    """Random bits as floats: sign and fraction stay, the exponent becomes one of two neighbouring powers of two."""
    power = round(math.log2(size / 1.5))
    if name == "F16":  # s eeeee ff, in the second byte
        table = bytes(byte & 0x83 | (15 + power - (byte >> 2 & 1)) << 2 for byte in range(256))
        data[1::2] = data[1::2].translate(table)
        return bytes(data)
    # s eeeeeee | e fffffff, in the last two bytes
    stride = TYPES[name].bytes
    exponents = 127 + power
    data[stride - 1 :: stride] = data[stride - 1 :: stride].translate(
        bytes(byte & 0x80 | exponents >> 1 for byte in range(256))
    )
    data[stride - 2 :: stride] = data[stride - 2 :: stride].translate(
        bytes(byte & 0x7F | (exponents & 1) << 7 for byte in range(256))
    )
    return bytes(data)


def floats(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)
