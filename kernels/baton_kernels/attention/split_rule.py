"""Length of the splits into which attention cuts a context, by that context's length alone.

Pure numpy on the host.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]

# More splits than any context has.
_UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class SplitRule:
    """Rule of splits: `least` tokens long, and doubled until a context has at most `most`.

    Short contexts get as many splits as programs keep a GPU busy, and long ones no more, since
    each has a partial result. Nothing but a token's own context decides, so that its result does
    not depend on the batch.
    """

    least: int
    most: int

    @classmethod
    def fixed(cls, num_tokens: int) -> Self:
        """Returns the rule of splits of `num_tokens` in every context."""
        return cls(num_tokens, _UNLIMITED)

    def split_tokens(self, contexts: IntArray) -> IntArray:
        """Returns the tokens of a split in contexts of so many tokens, at least 1 each."""
        _, num_doublings = np.frexp((contexts - 1) // (self.least * self.most))
        return np.left_shift(self.least, num_doublings, dtype=np.int64)

    def max_splits(self, max_context: int) -> int:
        """Returns the most splits of any context of up to `max_context` tokens."""
        return min(self.most, -(-max_context // self.least))
