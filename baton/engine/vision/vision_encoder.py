"""Vision encoder: computes the features of a step's images and keeps them until freed.

Decides neither which images a step encodes nor which it keeps: the scheduler's encoder cache does.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from baton.encoder_input import EncoderInput
from baton.engine.device_stream import uploader
from baton.engine.models.encoder_features import EncoderFeatures
from baton.engine.models.vision_model import VisionModel, tensor_of
from baton.engine.scheduler.scheduling.plan import StepPlan
from baton.engine.scheduler.sequences.batch_slots import Int64Array


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of an encoder output in a step: its rows [begin, end) fill the tokens of the flat
    batch from `row` on."""

    content_hash: bytes
    begin: int
    end: int
    row: int


class VisionEncoder:
    """Vision encoder of one engine, as the runner's `Encoder`.

    Attributes:
        images: the images that it takes.
        row_bytes: bytes of its output for a token.
    """

    def __init__(self, model: VisionModel) -> None:
        self._model = model
        self.images = model.images
        self.row_bytes = model.row_bytes
        self._outputs: dict[bytes, torch.Tensor] = {}
        self._upload = uploader(model.device)

    def encode(self, inputs: SequenceOf[EncoderInput]) -> None:
        """Computes the outputs of these inputs, together those whose tensors are alike."""
        for alike in _alike(inputs):
            names = alike[0].tensors
            tensors = {n: torch.cat([tensor_of(i.tensors[n]) for i in alike]) for n in names}
            token_ids = [t for i in alike for t in self.images.span(i.tensors)]
            outputs = self._model(tensors, token_ids).split([i.length for i in alike])
            for encoder_input, output in zip(alike, outputs, strict=True):
                # A copy, since a view would keep the others' memory when they are forgotten.
                self._outputs[encoder_input.content_hash] = output.clone()

    def forget(self, content_hash: bytes) -> None:
        del self._outputs[content_hash]

    def features(self, plan: StepPlan) -> EncoderFeatures | None:
        """Returns the features of the images' tokens that a plan computes; None if there are none.
        Their outputs must be here."""
        placements = tuple(placed_inputs(plan))
        if not placements:
            return None
        rows = np.concatenate([np.arange(p.row, p.row + p.end - p.begin) for p in placements])
        values = [self._outputs[p.content_hash][p.begin : p.end] for p in placements]
        return EncoderFeatures.of(self._upload(rows), torch.cat(values), self._model.hidden_size)

    def last_keys(self, plan: StepPlan) -> Int64Array | None:
        """Returns the position of the last token that each token of a plan sees, `[num_tokens]`:
        within an image in both directions, that of the image's last; None: no token sees later
        ones."""
        if not self.images.is_bidirectional:
            return None
        placements = tuple(placed_inputs(plan))
        if not placements:
            return None
        chunks = [np.arange(chunk.start, chunk.end) for chunk in plan.chunks]
        last_keys = np.concatenate([plan.decode_starts, *chunks])
        for placed in placements:
            end = placed.row + placed.end - placed.begin
            last_keys[placed.row : end] = last_keys[end - 1]
        return last_keys


def placed_inputs(plan: StepPlan) -> Iterator[Placement]:
    """Yields the encoder inputs whose tokens a plan computes; a plain decode has none."""
    row = len(plan.decode_slots)
    for chunk in plan.chunks:
        for encoder_input in chunk.sequence.request.encoder_inputs:
            start = max(encoder_input.start, chunk.start)
            end = min(encoder_input.end, chunk.end)
            if start < end:
                first = encoder_input.start
                yield Placement(
                    encoder_input.content_hash,
                    start - first,
                    end - first,
                    row + start - chunk.start,
                )
        row += chunk.end - chunk.start


def _alike(inputs: SequenceOf[EncoderInput]) -> Iterator[list[EncoderInput]]:
    """Yields the inputs whose tensors differ at most in their number of images."""
    groups: dict[Hashable, list[EncoderInput]] = defaultdict(list)
    for encoder_input in inputs:
        tensors = encoder_input.tensors.items()
        form = sorted((name, data.dtype, data.shape[1:]) for name, data in tensors)
        groups[tuple(form)].append(encoder_input)
    yield from groups.values()
