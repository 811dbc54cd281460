"""Vision encoder: computes the features of a step's images into blocks, and reads them from there.

Decides neither which images a step encodes nor which blocks they get: the scheduler's encoder cache
does.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.device_stream import uploader
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.models.vision_model import VisionModel, tensor_of
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.engine.scheduler.plan import StepPlan
from baton.engine.scheduler.sequences.batch_slots import Int64Array


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of an encoder output in a step: its rows [begin, end) fill the tokens of the flat
    batch from `row` on."""

    output: EncoderOutput
    begin: int
    end: int
    row: int


class VisionEncoder:
    """Vision encoder of one engine, as the runner's `Encoder`.

    Attributes:
        model: computes the rows of images.
        images: the images that it takes.
    """

    def __init__(self, model: VisionModel, pool: KvPool) -> None:
        """Takes the pool for its outputs, of `VisionModel.shape`."""
        self.model = model
        self.images = model.images
        self._block_size = pool.layout.block_size
        self._rows = pool.layers[0].keys[:, 0]  # [num_blocks, block_size, row width]
        self._upload = uploader(model.device)

    def encode(self, outputs: SequenceOf[EncoderOutput]) -> None:
        """Computes outputs into their blocks, together those whose tensors are alike."""
        for alike in _alike(outputs):
            names = alike[0].encoder_input.tensors
            inputs = [output.encoder_input for output in alike]
            tensors = {n: torch.cat([tensor_of(i.tensors[n]) for i in inputs]) for n in names}
            token_ids = [t for i in inputs for t in self.images.span(i.tensors)]
            places = self._places((o, 0, o.encoder_input.length) for o in alike)
            self._rows[places] = self.model(tensors, token_ids)

    def features(self, plan: StepPlan) -> EncoderFeatures | None:
        """Returns the features of the images' tokens that a plan computes; None if there are none.
        Their outputs must be in their blocks."""
        placements = tuple(placed_inputs(plan))
        if not placements:
            return None
        rows = np.concatenate([np.arange(p.row, p.row + p.end - p.begin) for p in placements])
        values = self._rows[self._places((p.output, p.begin, p.end) for p in placements)]
        return EncoderFeatures.of(self._upload(rows), values, self.model.hidden_size)

    def _places(
        self, ranges: Iterable[tuple[EncoderOutput, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the block, and the place in it, of the rows [begin, end) of each output."""
        block_ids, rows = zip(
            *((np.array(o.block_ids), np.arange(begin, end)) for o, begin, end in ranges),
            strict=True,
        )
        size = self._block_size
        blocks = [ids[r // size] for ids, r in zip(block_ids, rows, strict=True)]
        return self._upload(np.concatenate(blocks)), self._upload(np.concatenate(rows) % size)

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
        for output in chunk.encoder_outputs:
            first = output.encoder_input.start
            start = max(first, chunk.start)
            end = min(output.encoder_input.end, chunk.end)
            yield Placement(output, start - first, end - first, row + start - chunk.start)
        row += chunk.end - chunk.start


def _alike(outputs: SequenceOf[EncoderOutput]) -> Iterator[list[EncoderOutput]]:
    """Yields the outputs of inputs whose tensors differ at most in their number of images."""
    groups: dict[Hashable, list[EncoderOutput]] = defaultdict(list)
    for output in outputs:
        tensors = output.encoder_input.tensors.items()
        form = sorted((name, data.dtype, data.shape[1:]) for name, data in tensors)
        groups[tuple(form)].append(output)
    yield from groups.values()
