"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011).

A number is a pure function of (seed, sequence index, position), so a request draws the same ones
in any batch, on any worker, on any device, and a resumed request goes on where it was. The integers
are equal everywhere; floating-point functions of them may differ in the last bit between devices.
"""

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Four 32-bit words for each of a vector of counters.

    Args:
        counter: 4 int64 tensors of equal shape with values in [0, 2^32).
        key: 2 such tensors.

    Returns 4 int64 tensors with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two 32-bit words wraps in int64, but its bits are right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        hi0, hi1 = (p0 >> 32) & _MASK, (p1 >> 32) & _MASK
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, p1 & _MASK, hi0 ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def uniform(
    seeds: list[int], sequence_indices: list[int], positions: list[int], device: torch.device
) -> torch.Tensor:
    """One number in [0, 1) with 53 random bits per (seed, sequence index, position): float64."""
    words = [
        [p & _MASK for p in positions],
        [s & _MASK for s in sequence_indices],
        [p >> 32 for p in positions],
        [0] * len(positions),
        [s & _MASK for s in seeds],
        [s >> 32 for s in seeds],
    ]
    columns = list(torch.tensor(words, dtype=torch.int64, device=device))
    w0, w1, _, _ = philox(columns[:4], columns[4:])
    return ((w0 >> 5) * 2**26 + (w1 >> 6)).double() * 2.0**-53
