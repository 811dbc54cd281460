"""Tensor types of GGUF: the size of their blocks, and what to use in place of those not served."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage of a tensor's values.

    Attributes:
        name: as llama.cpp's tools have it.
        block_size: values of a block; a row has whole blocks.
        block_bytes: size of a block.
    """

    name: str
    block_size: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
"""Those that are served, by the number that a file has for them."""

_REFUSED = {
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    9: ("Q8_1", "Q8_0"),
    15: ("Q8_K", "Q8_0"),
    28: ("F64", "F32"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
    40: ("NVFP4", "MXFP4"),
    41: ("Q1_0", "TQ1_0"),
}
_NEAREST = "Q8_0"


def refusal(number: int) -> str:
    """Returns the name of a type that is not served, and the nearest that is."""
    name, nearest = _REFUSED.get(number, (f"number {number}", _NEAREST))
    return f"of type {name}, which Baton does not read; the nearest that it reads is {nearest}"
