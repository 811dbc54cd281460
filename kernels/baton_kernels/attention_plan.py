"""Work plan of a step's attention, as arrays that kernels read. Pure numpy on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer[Any]]
Int32Array = npt.NDArray[np.int32]

ITEM_FIELDS: Final = 8
TILE_FIELDS: Final = 4


@dataclass(frozen=True, slots=True)
class Spans:
    """Scheduled ranges of some or all sequences of a step: `[num_spans]` each.

    Attributes:
        batch_slots: row of each sequence in the block tables.
        starts: position of its first token in this step.
        num_queries: number of its tokens in this step; may be 0.
        first_tokens: index of its first token in the flat batch.
    """

    batch_slots: IntArray
    starts: IntArray
    num_queries: IntArray
    first_tokens: IntArray

    @classmethod
    def of_batch(cls, batch_slots: IntArray, starts: IntArray, num_queries: IntArray) -> "Spans":
        """Returns all sequences of a batch, whose tokens are contiguous in this order."""
        return cls(batch_slots, starts, num_queries, np.cumsum(num_queries) - num_queries)

    def __getitem__(self, at: Any) -> "Spans":
        return Spans(
            self.batch_slots[at], self.starts[at], self.num_queries[at], self.first_tokens[at]
        )

    def __len__(self) -> int:
        return len(self.batch_slots)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Shared prefix: sequences that begin with the same blocks.

    Attributes:
        members: indices of their spans.
        num_tokens: tokens that their contexts have in common, a multiple of the split.
    """

    members: IntArray
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Split plan: the work of `paged_decode`.

    A member is a query token; its partial results are in slots `first_slots[i]` up to
    `first_slots[i + 1]`, in the order of its context. An item is a part of the context with
    adjacent members that see it: (first member, number of members, batch slot, first key, end of
    the keys, begin and end of the keys that all members see, slot within each member's).

    Attributes:
        items: `[num_items, ITEM_FIELDS]`, each of one sequence.
        shared_items: `[num_shared_items, ITEM_FIELDS]`, each of a prefix of several sequences.
        members: `[num_members]`, index of the token in the flat batch.
        positions: `[num_members]`, position of that token: the last key it sees.
        first_slots: `[num_members + 1]`.
    """

    items: Int32Array
    shared_items: Int32Array
    members: Int32Array
    positions: Int32Array
    first_slots: Int32Array

    @property
    def num_slots(self) -> int:
        return int(self.first_slots[-1])


def plan_splits(
    spans: Spans,
    split_tokens: int,
    tile_keys: int,
    tokens_per_item: int,
    window: int | None = None,
    shared: Sequence[SharedPrefix] = (),
    tokens_per_shared_item: int = 1,
) -> SplitPlan:
    """Cuts contexts into splits at multiples of `split_tokens`.

    Args:
        tokens_per_item: number of tokens of one sequence that a program holds.
        shared: prefixes that are attended once for all their members; not with a window. A span
            is a member of at most one, and all its tokens see the whole prefix.
    """
    assert window is None or not shared, "a prefix out of the window is not seen by all"
    first = [prefix.members for prefix in shared]
    rest = np.setdiff1d(np.arange(len(spans)), np.concatenate([*first, np.empty(0, np.int64)]))
    order = np.concatenate([*first, rest]).astype(np.int64)
    done = np.zeros(len(spans), np.int64)  # splits of each span that shared items cover
    for prefix in shared:
        assert prefix.num_tokens % split_tokens == 0, "a shared prefix ends within a split"
        assert (spans.starts[prefix.members] >= prefix.num_tokens - 1).all(), "not all see it"
        done[prefix.members] = prefix.num_tokens // split_tokens
    units, owners = _cut(spans[order], tokens_per_item)
    last_keys = units.starts + units.num_queries - 1
    seen_begins = np.zeros_like(last_keys) if window is None else last_keys - window + 1
    begins = np.maximum(seen_begins - units.num_queries + 1, 0)
    first_splits = begins // split_tokens
    num_splits = last_keys // split_tokens - first_splits + 1
    own_splits = num_splits - done[order][owners]
    first_members = np.cumsum(units.num_queries) - units.num_queries

    of, number = _expand(own_splits)
    slots = number + (num_splits - own_splits)[of]
    edges = (first_splits[of] + slots) * split_tokens
    items = np.stack(
        [
            first_members[of],
            units.num_queries[of],
            units.batch_slots[of],
            np.maximum(edges, begins[of] // tile_keys * tile_keys),
            np.minimum(edges + split_tokens, last_keys[of] + 1),
            seen_begins[of],
            units.starts[of] + 1,
            slots,
        ],
        axis=1,
    )
    of, number = _expand(units.num_queries)
    slot_counts = np.repeat(num_splits, units.num_queries)
    return SplitPlan(
        items.astype(np.int32),
        _plan_shared(spans, split_tokens, shared, tokens_per_shared_item),
        (units.first_tokens[of] + number).astype(np.int32),
        (units.starts[of] + number).astype(np.int32),
        np.concatenate([[0], np.cumsum(slot_counts)]).astype(np.int32),
    )


def _plan_shared(
    spans: Spans, split_tokens: int, shared: Sequence[SharedPrefix], tokens_per_item: int
) -> Int32Array:
    items, first_member = [np.empty((0, ITEM_FIELDS), np.int64)], 0
    for prefix in shared:
        num_members = int(spans.num_queries[prefix.members].sum())
        batch_slot = spans.batch_slots[prefix.members[0]]
        for slot in range(prefix.num_tokens // split_tokens):
            begin, end = slot * split_tokens, (slot + 1) * split_tokens
            offsets = np.arange(0, num_members, tokens_per_item)
            counts = np.minimum(num_members - offsets, tokens_per_item)
            rest = np.tile([batch_slot, begin, end, begin, end, slot], (len(offsets), 1))
            items.append(np.column_stack([first_member + offsets, counts, rest]))
        first_member += num_members
    return np.concatenate(items).astype(np.int32)


def plan_tiles(spans: Spans, tokens_per_tile: int) -> Int32Array:
    """Returns the work of `paged_prefill`: `[num_tiles, TILE_FIELDS]`, the longest contexts first,
    so that no long tile runs last.

    A tile is (first token in the flat batch, number of tokens, batch slot, first position).
    """
    tiles, _ = _cut(spans, tokens_per_tile)
    fields = [tiles.first_tokens, tiles.num_queries, tiles.batch_slots, tiles.starts]
    order = np.argsort(-(tiles.starts + tiles.num_queries), kind="stable")
    return np.stack(fields, axis=1)[order].astype(np.int32)


def _cut(spans: Spans, num_tokens: int) -> tuple[Spans, IntArray]:
    """Cuts spans into pieces of at most `num_tokens`. Returns them with each one's span index."""
    of, number = _expand(-(-spans.num_queries // num_tokens))
    offsets = number * num_tokens
    pieces = Spans(
        spans.batch_slots[of],
        spans.starts[of] + offsets,
        np.minimum(spans.num_queries[of] - offsets, num_tokens),
        spans.first_tokens[of] + offsets,
    )
    return pieces, of


def _expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Returns, for `counts[i]` copies of each i, that i and the number of the copy."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
