"""Block tables on the device, at fixed addresses, to which only changed rows are sent."""

import numpy as np
import torch

from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.device_stream import uploader


class DeviceTables:
    """Block tables of batch slots on the device: one row per slot, in each cache group.

    Rows are those of `RaggedBatch.block_tables`, for the sequences of the last `update`.

    Attributes:
        tensors: per cache group, `[num_batch_slots, max_blocks]` in int32.
    """

    def __init__(
        self, num_groups: int, num_batch_slots: int, max_blocks: int, device: torch.device
    ) -> None:
        shape = (num_batch_slots, max_blocks)
        self.tensors = tuple(
            torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(num_groups)
        )
        self._versions = np.full(num_batch_slots, -1)  # of the rows that were sent
        self._upload = uploader(device)

    def update(self, ragged: RaggedBatch) -> None:
        """Sends the rows of a step's sequences that have changed since they were sent, in the order
        of the device's stream."""
        batch_slots, versions = ragged.batch_slots, ragged.table_versions
        if versions is not None:
            batch_slots = batch_slots[versions[batch_slots] != self._versions[batch_slots]]
            self._versions[batch_slots] = versions[batch_slots]
        if len(batch_slots):
            rows = self._upload(batch_slots)
            for tensor, table in zip(self.tensors, ragged.block_tables, strict=True):
                changed = self._upload(table[batch_slots])
                tensor[:, : table.shape[1]].index_copy_(0, rows, changed)
