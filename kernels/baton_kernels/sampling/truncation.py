"""Top-k, top-p and min-p without sorting: device functions of all kernels that truncate.

A score is (logit - largest) / temperature, rounded as in the CPU sampler, and so at most 0. Its key
is an integer of the same order, so that bisection over keys finds a threshold. Tokens at the
threshold are ties, of which the lowest ids are kept. Chances are integers too, in units of 2^-44 of
the largest: integer sums do not depend on order, so partial searches agree with each other. A
chance below one unit is never drawn.
"""

import struct

import triton
import triton.language as tl

_NEGLIGIBLE = -31.0

LOWEST = tl.constexpr(-(2**31))  # a key below those of all scores
NO_TOKEN = tl.constexpr(2**31 - 1)
UNIT = tl.constexpr(2.0**44)
SMALLEST = tl.constexpr(2.0**-126)  # lower bound of temperatures
# Scores from which on down chances are less than a unit.
NEGLIGIBLE = tl.constexpr(_NEGLIGIBLE)
NEGLIGIBLE_KEY = tl.constexpr(struct.unpack("<i", struct.pack("<f", _NEGLIGIBLE))[0] ^ 0x7FFFFFFF)


@triton.jit
def score_of(logits, largest, temperature):
    """Returns scores bitwise equal to the CPU sampler's; `temperature` is at least `SMALLEST`."""
    return tl.div_rn(logits - largest, temperature)


@triton.jit
def key_of(scores):
    """Returns int32 keys in the order of the scores, the same for 0 and -0."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of_key(key):
    """Returns the score of a key: the inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def chance_of(scores):
    """Returns int64 chances in units. `scores` are float64 if precision matters more than speed,
    else float32."""
    chances = tl.exp(tl.maximum(scores, NEGLIGIBLE - 1.0))
    return tl.where(scores > NEGLIGIBLE, chances.to(tl.float64) * UNIT, 0.0).to(tl.int64)


@triton.jit
def middle(low, high):
    """Returns the mean, rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def kth_largest(keys, k):
    """Returns the least key with fewer than `k` keys above it, at least `NEGLIGIBLE_KEY`."""
    low = tl.full((), NEGLIGIBLE_KEY, tl.int32)
    high = tl.maximum(tl.max(keys, axis=0), low)
    while low < high:
        key = middle(low, high)
        if tl.sum((keys > key).to(tl.int32), axis=0) < k:
            high = key
        else:
            low = key + 1
    return low


@triton.jit
def nucleus(keys, chances, floor, mass):
    """Returns the least key, at least `floor`, with chances of less than `mass` above it."""
    low, high = floor, tl.maximum(tl.max(keys, axis=0), floor)
    while low < high:
        key = middle(low, high)
        if tl.sum(tl.where(keys > key, chances, 0), axis=0).to(tl.float64) < mass:
            high = key
        else:
            low = key + 1
    return low


@triton.jit
def num_ties(mass, above, chance):
    """Returns the number of tokens of `chance` that, added to `above`, reach `mass`."""
    wanted = (mass - above.to(tl.float64)) / tl.maximum(chance, 1).to(tl.float64)
    return tl.minimum(tl.ceil(wanted), 2.0**30).to(tl.int32)
