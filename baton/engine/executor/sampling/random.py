"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011).

A number is a pure function of (seed, sequence index, position), so a request draws the same numbers
in any batch, on any worker and device, also after a resumption. They are computed on the host,
where the few of a step cost less than kernel launches.
"""

import numpy as np
import numpy.typing as npt

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
# Multipliers of counter words 0 and 2, and the sums added to both key words before each round.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], np.uint64
)


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns four 32-bit random words for each of a vector of counters.

    Args:
        counter: `[4, n]`, values in [0, 2^32).
        key: `[2, n]`, values in [0, 2^32).

    Returns `[4, n]`, values in [0, 2^32).
    """
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _WEYL) & _MASK:
        product = even * _MULTIPLIERS
        even = (product >> _HALF)[::-1] ^ odd ^ round_key
        odd = (product & _MASK)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(
    seeds: npt.NDArray[np.uint64],
    sequence_indices: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Returns a number in [0, 1) with 53 random bits per (seed, sequence index, position)."""
    counter = np.zeros((4, len(seeds)), np.uint64)
    counter[0] = positions
    counter[2] = counter[0] >> _HALF
    counter[0] &= _MASK
    counter[1] = sequence_indices
    words = philox(counter, np.stack([seeds & _MASK, seeds >> _HALF]))
    mantissas = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    numbers: npt.NDArray[np.float64] = mantissas * 2.0**-53
    return numbers
