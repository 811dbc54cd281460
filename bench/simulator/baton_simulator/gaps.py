"""Times between tokens, of which there are millions. Knows nothing of requests."""

from array import array

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Gaps:
    """Weighted values, and their percentiles."""

    def __init__(self) -> None:
        self._values = array("d")
        self._weights = array("q")

    def __len__(self) -> int:
        """Returns the number of values, by weight."""
        return sum(self._weights)

    def add(self, values: FloatArray, weight: int = 1) -> None:
        """Adds each value `weight` times."""
        self._values.frombytes(values.tobytes())
        self._weights.frombytes(np.full(len(values), weight, np.int64).tobytes())

    def percentiles(self, shares: tuple[float, ...]) -> tuple[float, ...]:
        """For each share in [0, 1] the least value that so many do not exceed; 0 without values."""
        if not self._values:
            return (0.0,) * len(shares)
        values = np.frombuffer(self._values, np.float64)
        order = np.argsort(values, kind="stable")
        counts = np.cumsum(np.frombuffer(self._weights, np.int64)[order])
        places = np.searchsorted(counts, np.ceil(np.array(shares) * counts[-1]).clip(1))
        return tuple(values[order][places].tolist())
