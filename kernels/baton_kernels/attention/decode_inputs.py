"""Inputs of a recorded decode step, in one array, so that a step needs one copy to the device:

    positions | cache slots, per cache group | packed plans, per kind of layer

The first two are rows of int64. Pure numpy; `baton_kernels.cpu.decode_inputs` does it in one call.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from baton_kernels.attention.plan import Int32Array, Int64Array, Ranges, SharedPrefix, plan_splits
from baton_kernels.attention.plan_arrays import SplitCapacity, pack_into
from baton_kernels.attention.split_rule import SplitRule

# Inputs begin at multiples of 16 bytes: kernels are compiled for that.
_ALIGNED: Final = 2  # int64 numbers


@dataclass(frozen=True, slots=True)
class KindInputs:
    """Inputs of one kind of layer.

    Attributes:
        capacity: capacity of its packed plan.
        max_partials: maximum number of partial results.
        max_decode_tokens: most tokens of a sequence that decodes, drafts included.
        splits, tile_keys, tokens_per_item, window, tokens_per_shared_item: see `plan_splits`.
    """

    capacity: SplitCapacity
    max_partials: int
    max_decode_tokens: int
    splits: SplitRule
    tile_keys: int
    tokens_per_item: int
    window: int | None
    tokens_per_shared_item: int


class DecodeInputs:
    """Layout of the inputs of decode steps, and their writer.

    Attributes:
        header: rows of int64, and numbers in each: `max_rows`, and padding.
        kinds, places: of each kind of layer, its inputs and their place among all, in int32.
        size: number of int32 in all.
    """

    def __init__(
        self, num_groups: int, max_rows: int, block_size: int, kinds: Sequence[KindInputs]
    ) -> None:
        self.header = (1 + num_groups, -(-max_rows // _ALIGNED) * _ALIGNED)
        self.block_size = block_size
        self.kinds = tuple(kinds)
        sizes = [2 * math.prod(self.header), *(sum(kind.capacity.sizes) for kind in kinds)]
        *edges, self.size = itertools.accumulate(sizes)
        self.places = [slice(*p) for p in itertools.pairwise([*edges, self.size])]

    def header_of(self, inputs: Int32Array) -> Int64Array:
        """Returns the header as a view, `header` in shape."""
        return inputs[: 2 * math.prod(self.header)].view(np.int64).reshape(self.header)

    def write(
        self,
        inputs: Int32Array,
        ranges: Ranges,
        tables: Sequence[Int32Array],
        num_rows: int,
        shared: Sequence[Sequence[SharedPrefix]] = (),
    ) -> int | None:
        """Writes the inputs of decodes; rows from their tokens to `num_rows` become padding.

        Args:
            inputs: `[size]`.
            ranges: the decodes, each with its drafts; int64.
            tables: per cache group, `[num_batch_slots, blocks]`.
            shared: prefixes to attend once, per kind of layer; none: not any.

        Returns the end of what the device reads; None if a plan exceeds its capacity, or a sequence
        has more tokens than one that decodes.
        """
        batch_slots, token_positions = ranges.places()
        num_tokens = len(batch_slots)
        header = self.header_of(inputs)
        header[:, num_tokens:num_rows] = 0
        positions, *slots = header[:, :num_tokens]
        positions[:] = token_positions
        indices, offsets = np.divmod(token_positions, self.block_size)
        for places, table in zip(slots, tables, strict=True):
            places[:] = table[batch_slots, indices]
            places *= self.block_size
            places += offsets
        end = 2 * math.prod(self.header)
        for i, (kind, place) in enumerate(zip(self.kinds, self.places, strict=True)):
            if (ranges.num_queries > kind.max_decode_tokens).any():
                return None
            plan = plan_splits(
                ranges,
                kind.splits,
                kind.tile_keys,
                kind.tokens_per_item,
                kind.window,
                shared[i] if shared else (),
                kind.tokens_per_shared_item,
            )
            is_within = plan.num_slots <= kind.max_partials
            if not is_within or not SplitCapacity.of(plan).fits(kind.capacity):
                return None
            end = place.start + pack_into(inputs[place], plan, kind.capacity)
        return end
