"""The tokens of those sequences that look at them, on the device.

So that nothing waits for the host: the token that a step draws is appended where it was drawn, and
the next step may look at it before the host has seen it. What the host knows and the device does
not (prompts, drafts, what another worker has computed) is sent when it is looked at. Knows nothing
of what the tokens are looked at for.
"""

import numpy as np
import torch

from baton.engine.attention.interface import uploader
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray

_LEAST_CAPACITY = 1024


class DeviceHistory:
    """A row per slot, as wide as the longest sequence that has looked at its own needs it.

    Attributes:
        token_ids: int32 `[num_batch_slots, capacity]`; of a slot that was brought up to date to a
            length, so many of its tokens.
    """

    def __init__(self, num_batch_slots: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_batch_slots, 0, dtype=torch.int32, device=device)
        self._num_known = np.zeros(num_batch_slots, np.int64)
        self._upload = uploader(device)

    def forget(self, batch_slot: int) -> None:
        """Another sequence takes the slot, or its tokens have become others."""
        self._num_known[batch_slot] = 0

    def update(self, batch_slots: Int64Array, lengths: Int64Array, token_ids: TokenArray) -> None:
        """Sends what is missing of the first `lengths` tokens of each slot.

        Args:
            batch_slots, lengths: `[num_rows]`; a slot may have several rows.
            token_ids: `[num_batch_slots, any]`, the host's; read where the device lacks something
                alone.
        """
        self._widen(int(lengths.max(initial=0)) + 1)
        ends = np.zeros(len(self._num_known), np.int64)
        np.maximum.at(ends, batch_slots, lengths)
        late = np.flatnonzero(ends > self._num_known)
        if not late.size:
            return
        begins, counts = self._num_known[late], ends[late] - self._num_known[late]
        shifts = np.repeat(begins - (np.cumsum(counts) - counts), counts)
        places, of = np.arange(len(shifts)) + shifts, np.repeat(late, counts)
        cells = self._upload(of * self.token_ids.shape[1] + places)
        self.token_ids.view(-1)[cells] = self._upload(token_ids[of, places].astype(np.int32))
        self._num_known[late] = ends[late]

    def append(self, batch_slots: Int64Array, lengths: Int64Array, chosen: torch.Tensor) -> None:
        """Takes the tokens that follow the first `lengths` of each slot, on the device.

        Where a slot has several rows nobody knows yet which of them holds: then what is behind the
        shortest is forgotten.

        Args: chosen: `[num_rows]`.
        """
        cells = self._upload(batch_slots * self.token_ids.shape[1] + lengths)
        self.token_ids.view(-1)[cells] = chosen.to(torch.int32)
        self._num_known[batch_slots] = lengths + 1
        one_slot, first, counts = np.unique(batch_slots, return_index=True, return_counts=True)
        has_several = counts > 1
        self._num_known[one_slot[has_several]] = lengths[first[has_several]]

    def _widen(self, capacity: int) -> None:
        old = self.token_ids
        if capacity > old.shape[1]:
            capacity = max(1 << (capacity - 1).bit_length(), _LEAST_CAPACITY)
            self.token_ids = old.new_zeros(len(old), capacity)
            self.token_ids[:, : old.shape[1]] = old
