"""Top-k, top-p and min-p without sorting: what every kernel that truncates is made of.

A score is (logit - largest) / temperature, rounded as the sampler of the CPU rounds it, and so at
most 0. Its key is an integer of the same order, so that a threshold is found by bisection of the
keys. What lies at the threshold itself is a tie, of which the lowest ids stay. Chances are integers
too, in units of 2^-44 of the largest: sums of integers are the same in any order, so that searches
in parts agree with each other. What is less than a unit is never drawn.
"""

import struct

import triton
import triton.language as tl

_NEGLIGIBLE = -31.0

LOWEST = tl.constexpr(-(2**31))  # a key below those of all scores
NO_TOKEN = tl.constexpr(2**31 - 1)
UNIT = tl.constexpr(2.0**44)
SMALLEST = tl.constexpr(2.0**-126)  # that a temperature is taken for
# From this score down, chances are less than a unit.
NEGLIGIBLE = tl.constexpr(_NEGLIGIBLE)
NEGLIGIBLE_KEY = tl.constexpr(struct.unpack("<i", struct.pack("<f", _NEGLIGIBLE))[0] ^ 0x7FFFFFFF)


@triton.jit
def score_of(logits, largest, temperature):
    """Bitwise what the sampler of the CPU ranks by; `temperature` is no less than
    `SMALLEST`."""
    return tl.div_rn(logits - largest, temperature)


@triton.jit
def key_of(scores):
    """An int32 of the order of the scores, the same for both zeros."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of_key(key):
    """The inverse of `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def chance_of(scores):
    """int64, in units; `scores` of float64 where it may cost something, else of float32."""
    chances = tl.exp(tl.maximum(scores, NEGLIGIBLE - 1.0))
    return tl.where(scores > NEGLIGIBLE, chances.to(tl.float64) * UNIT, 0.0).to(tl.int64)


@triton.jit
def middle(low, high):
    """Their mean, rounded down, which does not overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def kth_largest(keys, k):
    """The key that fewer than `k` keys are above; `NEGLIGIBLE_KEY` if it were lower."""
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
    """The key, `floor` or above, that chances of less than `mass` are above."""
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
    """How many tokens of this chance it takes after those of `above` until `mass` is reached."""
    wanted = (mass - above.to(tl.float64)) / tl.maximum(chance, 1).to(tl.float64)
    return tl.minimum(tl.ceil(wanted), 2.0**30).to(tl.int32)
