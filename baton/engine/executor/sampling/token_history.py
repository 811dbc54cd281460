"""Token history on the device, for sequences whose sampling parameters read it.

It avoids host synchronization: a drawn token is appended on the device, and the next step may read
it before the host has it. Tokens that only the host has (prompts, drafts, tokens of another worker)
are uploaded before they are read.
"""

import numpy as np
import torch

from baton.engine.executor.device_stream import uploader
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray

_LEAST_CAPACITY = 1024


class DeviceHistory:
    """Token history with a row per slot, as wide as the longest sequence that has read its own.

    Attributes:
        token_ids: int32 `[num_batch_slots, capacity]`; valid up to the length of the slot's last
            `update` or `append`.
    """

    def __init__(self, num_batch_slots: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_batch_slots, 0, dtype=torch.int32, device=device)
        self._num_known = np.zeros(num_batch_slots, np.int64)
        self._upload = uploader(device)

    def forget(self, batch_slot: int) -> None:
        """Invalidates the slot's row: it has another sequence, or its tokens have changed."""
        self._num_known[batch_slot] = 0

    def update(self, batch_slots: Int64Array, lengths: Int64Array, token_ids: TokenArray) -> None:
        """Uploads tokens that the device lacks of the first `lengths` of each slot.

        Args:
            batch_slots, lengths: `[num_rows]`; a slot may have several rows.
            token_ids: `[num_batch_slots, any]`, the host's; only read for tokens that are missing.
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
        """Appends, on the device, the token after the first `lengths` of each slot.

        If a slot has several rows, it is unknown which of them will be kept: then tokens after the
        shortest are invalid.

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
