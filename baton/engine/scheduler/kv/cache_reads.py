"""Cache reads: tokens whose K and V the attention of a step reads. Limits nothing."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.sequences.batch_slots import Int64Array


class CacheReads:
    """Cache reads of token ranges, in tokens, as a mean over the layers.

    The range [start, end) of a sequence reads `end` tokens in a layer without a window, and in a
    windowed one those that some token of the range sees.
    """

    def __init__(self, groups: SequenceOf[CacheGroup]) -> None:
        self._groups = [(group.num_layers, group.window) for group in groups]
        self._num_layers = sum(group.num_layers for group in groups)

    def of(self, start: int, end: int) -> float:
        """Returns the reads of one range."""
        return float(self.of_each(np.array([start]), np.array([end]))[0])

    def of_each(self, starts: Int64Array, ends: Int64Array) -> npt.NDArray[np.float64]:
        """Returns the reads of several ranges, `[num_ranges]`."""
        total = np.zeros(len(starts), np.int64)
        for num_layers, window in self._groups:
            reads = ends if window is None else ends - np.maximum(starts - window + 1, 0)
            total += num_layers * reads
        return total / self._num_layers
