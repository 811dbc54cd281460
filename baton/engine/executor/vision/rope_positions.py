"""Rotary positions of running sequences with images, in three dimensions (M-RoPE).

Text advances all three by one. The tokens of an image have its rows and columns; the text after it
continues after the largest. So what follows the last image is an offset away from its index.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np

from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.models.images.encoder_input import EncoderInput
from baton.models.images.patched import PatchedImages


def prompt_positions(images: PatchedImages, inputs: SequenceOf[EncoderInput]) -> Int64Array:
    """Returns the positions of a prompt up to the end of its last image, `[3, num_tokens]`; after
    it, they continue with the largest plus one."""
    parts: list[Int64Array] = []
    index = position = 0
    for encoder_input in inputs:
        num_text = encoder_input.start - index
        height, width = images.grid(encoder_input.tensors)
        parts.append(np.tile(np.arange(position, position + num_text), (3, 1)))
        position += num_text
        parts.append(position + np.indices((1, height, width)).reshape(3, -1))
        position += max(height, width)
        index = encoder_input.end
    return np.concatenate(parts, axis=1)


class RopePositions:
    """Rotary positions by batch slot, as the runner's `Positions`."""

    def __init__(self, num_batch_slots: int, images: PatchedImages) -> None:
        self._images = images
        self._offsets: Int64Array = np.zeros(num_batch_slots, np.int64)
        self._prompts: dict[int, Int64Array] = {}  # of the slots whose sequences have images

    def assign(self, batch_slot: int, inputs: SequenceOf[EncoderInput]) -> None:
        self._prompts.pop(batch_slot, None)
        self._offsets[batch_slot] = 0
        if inputs:
            prompt = prompt_positions(self._images, inputs)
            self._prompts[batch_slot] = prompt
            self._offsets[batch_slot] = prompt.max() + 1 - prompt.shape[1]

    def offsets(self, batch_slots: Int64Array) -> Int64Array | None:
        if not self._prompts:
            return None
        offsets = self._offsets[batch_slots]
        return offsets if offsets.any() else None

    def positions(
        self, ragged: RaggedBatch, batch_slots: Int64Array, indices: Int64Array
    ) -> Int64Array:
        if not self._prompts:
            return indices
        positions = indices + self._offsets[batch_slots]
        row = ragged.num_decodes  # all after their images
        for slot, start, num_queries in zip(
            *(a[row:].tolist() for a in (ragged.batch_slots, ragged.starts, ragged.num_queries)),
            strict=True,
        ):
            prompt = self._prompts.get(slot)
            if prompt is not None and start < prompt.shape[1]:
                if positions.ndim == 1:
                    positions = np.tile(positions, (3, 1))
                part = prompt[:, start : start + num_queries]
                positions[:, row : row + part.shape[1]] = part
            row += num_queries
        return positions
