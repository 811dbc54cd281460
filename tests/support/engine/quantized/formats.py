"""All formats of quantized weights that tests write."""

from tests.support.engine.quantized import (
    bitsandbytes,
    compressed_tensors,
    fp4,
    fp8,
    grouped_integers,
)
from tests.support.engine.quantized.written import Format

FORMATS: dict[str, Format] = (
    fp8.FORMATS
    | grouped_integers.FORMATS
    | fp4.FORMATS
    | compressed_tensors.FORMATS
    | bitsandbytes.FORMATS
)
# Those of some families alone.
OF_FAMILIES = {"gpt_oss": fp4.MXFP4}
# Those that transformers reads here: of others it needs packages or devices that tests lack, or
# takes the blocks at the end of a weight for whole ones.
BY_TRANSFORMERS = ["fp8 in blocks", "fp8 as a whole", "mxfp8", *compressed_tensors.FORMATS]
