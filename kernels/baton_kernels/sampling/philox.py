"""Philox random numbers on the device, bitwise those of `baton.engine.executor.sampling.random`.

Triton provides Philox4x32-10; this module lays out its counter from (seed, sequence index,
position) and converts the words to a number.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, sequence_index, position):
    """Returns a float64 in [0, 1) with 53 random bits. Arguments are int64; `seed` is used as 64
    bits."""
    high = (position >> 32).to(tl.uint32)
    words = tl.philox(
        seed, position.to(tl.uint32), sequence_index.to(tl.uint32), high, tl.zeros_like(high)
    )
    mantissa = ((words[0] >> 5).to(tl.int64) << 26) | (words[1] >> 6).to(tl.int64)
    return mantissa.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
