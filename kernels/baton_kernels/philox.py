"""The random number of a token: `baton.engine.sampling.random` on the device, bit by bit.

Philox4x32-10 over (seed, sequence index, position), which Triton has; what is ours is how the
counter is laid out and how a number is made of the words.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(seed, sequence_index, position):
    """A float64 in [0, 1) with 53 random bits. All are int64; of the seed the bits count."""
    high = (position >> 32).to(tl.uint32)
    words = tl.philox(
        seed, position.to(tl.uint32), sequence_index.to(tl.uint32), high, tl.zeros_like(high)
    )
    mantissa = ((words[0] >> 5).to(tl.int64) << 26) | (words[1] >> 6).to(tl.int64)
    return mantissa.to(tl.float64) * 1.1102230246251565e-16  # 2^-53
