"""Work plan of a step's attention, as arrays that kernels read. Pure numpy on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_kernels.attention.split_rule import IntArray, SplitRule

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

Column = IntArray | int


class SplitItem(NamedTuple):
    """Item of a split plan: one split of the context, with adjacent members that see it.

    Plans pack columns of it, and the kernel reads its fields at their offsets.

    Attributes:
        first_member, num_members: range of its members.
        batch_slot: row of its sequence in the block tables.
        begin, end: half-open range of its keys.
        seen_begin, seen_end: half-open range of the keys that all its members see.
        slot: index of its partial results within each member's.
    """

    first_member: Column
    num_members: Column
    batch_slot: Column
    begin: Column
    end: Column
    seen_begin: Column
    seen_end: Column
    slot: Column


class PrefillTile(NamedTuple):
    """Tile of a prefill: adjacent tokens of one sequence. Packed and read as `SplitItem` is.

    Attributes:
        first_token: index of its first token in the flat batch.
        num_tokens: number of its tokens.
        batch_slot: row of its sequence in the block tables.
        start: position of its first token.
        last_key: position that all its tokens see up to; 0: each sees up to its own.
        split_tokens: partial results begin at its multiples in the context; 0: nowhere.
    """

    first_token: Column
    num_tokens: Column
    batch_slot: Column
    start: Column
    last_key: Column
    split_tokens: Column


ITEM_FIELDS: Final = len(SplitItem._fields)
TILE_FIELDS: Final = len(PrefillTile._fields)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Scheduled ranges of some or all sequences of a step: `[num_ranges]` each.

    Attributes:
        batch_slots: row of each sequence in the block tables.
        starts: position of its first token in this step.
        num_queries: number of its tokens in this step; may be 0.
        first_tokens: index of its first token in the flat batch.
        last_keys: position that all its tokens see up to, as those of an image do that see each
            other in both directions; 0: each sees up to its own. None: 0 everywhere.
    """

    batch_slots: Int64Array
    starts: Int64Array
    num_queries: Int64Array
    first_tokens: Int64Array
    last_keys: Int64Array | None = None

    @classmethod
    def of_batch(
        cls, batch_slots: Int64Array, starts: Int64Array, num_queries: Int64Array
    ) -> "Ranges":
        """Returns all sequences of a batch, whose tokens are contiguous in this order."""
        return cls(batch_slots, starts, num_queries, np.cumsum(num_queries) - num_queries)

    @property
    def are_decodes(self) -> bool:
        """Whether every sequence has one token."""
        return bool((self.num_queries == 1).all())

    def places(self) -> tuple[Int64Array, Int64Array]:
        """Returns batch slot and position of each token of the flat batch, `[num_tokens]` each."""
        if self.are_decodes:
            return self.batch_slots, self.starts
        counts = self.num_queries
        shifts = np.repeat(self.starts - self.first_tokens, counts)
        return np.repeat(self.batch_slots, counts), np.arange(len(shifts)) + shifts

    def seeing(self, last_keys: Int64Array) -> "Ranges":
        """Returns the ranges of a whole batch, cut where the tokens begin or cease to see up to the
        same key.

        Args:
            last_keys: `[num_tokens]`, position of the last token that each sees.
        """
        of, number = _expand(self.num_queries)
        positions = self.starts[of] + number
        follows = number[1:] > 0  # another token of the same range
        alike = np.concatenate([[False], follows & (last_keys[1:] == last_keys[:-1])])
        seen = np.where(alike | (last_keys > positions), last_keys, 0)
        pieces, _ = self.cut_by(seen)
        return replace(pieces, last_keys=seen[pieces.first_tokens])

    def cut_by(self, values: IntArray) -> tuple["Ranges", IntArray]:
        """Cuts ranges where the value of a token is not that of the one before. Returns the pieces,
        and the range of each.

        Args:
            values: `[num_tokens]`, of the tokens of one range after the other.
        """
        of, number = _expand(self.num_queries)
        is_first = np.ones(len(of), np.bool_)
        is_first[1:] = (number[1:] == 0) | (values[1:] != values[:-1])
        begins = is_first.nonzero()[0]
        of, number = of[begins], number[begins]
        pieces = Ranges(
            self.batch_slots[of],
            self.starts[of] + number,
            np.diff(np.append(begins, len(values))),
            self.first_tokens[of] + number,
            None if self.last_keys is None else self.last_keys[of],
        )
        return pieces, of

    def __getitem__(self, at: Any) -> "Ranges":
        last_keys = None if self.last_keys is None else self.last_keys[at]
        return Ranges(
            self.batch_slots[at],
            self.starts[at],
            self.num_queries[at],
            self.first_tokens[at],
            last_keys,
        )

    def __len__(self) -> int:
        return len(self.batch_slots)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Shared prefix: sequences that begin with the same blocks.

    Attributes:
        members: indices of their ranges.
        num_tokens: tokens that their contexts have in common, a multiple of the members' split.
    """

    members: IntArray
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Split plan: the work of `paged_decode`.

    A member is a query token; its partial results are in slots `first_slots[i]` up to
    `first_slots[i + 1]`, in the order of its context.

    Attributes:
        items: `[num_items, ITEM_FIELDS]`, rows of `SplitItem`, each of one sequence.
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
    ranges: Ranges,
    splits: SplitRule,
    tile_keys: int,
    tokens_per_item: int,
    window: int | None = None,
    shared: Sequence[SharedPrefix] = (),
    tokens_per_shared_item: int = 1,
) -> SplitPlan:
    """Cuts contexts into splits at multiples of their length, which is that of what each token
    sees. Tokens see up to their own.

    Args:
        tokens_per_item: number of tokens of one sequence that a program holds.
        shared: prefixes that are attended once for all their members; not with a window. A range
            is a member of at most one, and all its tokens see the whole prefix. Members of one
            prefix have the same split.
    """
    assert window is None or not shared, "a prefix out of the window is not seen by all"
    if not shared and ranges.are_decodes:
        return _plan_decodes(ranges, splits, tile_keys, window)
    order = np.arange(len(ranges))
    if shared:
        first = np.concatenate([prefix.members for prefix in shared])
        order = np.concatenate([first, np.setdiff1d(order, first)])
    done = np.zeros(len(ranges), np.int64)  # tokens of each range that shared items cover
    for prefix in shared:
        assert (ranges.starts[prefix.members] >= prefix.num_tokens - 1).all(), "not all see it"
        done[prefix.members] = prefix.num_tokens
    units, owners = _cut(ranges[order], tokens_per_item)
    units, split, of_units = _cut_by_split(units, splits, window)
    done = done[order][owners[of_units]]
    assert not (done % split).any(), "a shared prefix ends within a split"
    last_keys = units.starts + units.num_queries - 1
    seen_begins = np.zeros_like(last_keys) if window is None else last_keys - window + 1
    begins = np.maximum(seen_begins - units.num_queries + 1, 0)
    first_splits = begins // split
    num_splits = last_keys // split - first_splits + 1
    own_splits = num_splits - done // split
    first_members = np.cumsum(units.num_queries) - units.num_queries

    of, number = _expand(own_splits)
    slots = number + (num_splits - own_splits)[of]
    edges = (first_splits[of] + slots) * split[of]
    items = SplitItem(
        first_member=first_members[of],
        num_members=units.num_queries[of],
        batch_slot=units.batch_slots[of],
        begin=np.maximum(edges, begins[of] // tile_keys * tile_keys),
        end=np.minimum(edges + split[of], last_keys[of] + 1),
        seen_begin=seen_begins[of],
        seen_end=units.starts[of] + 1,
        slot=slots,
    )
    of, number = _expand(units.num_queries)
    slot_counts = np.repeat(num_splits, units.num_queries)
    return SplitPlan(
        _rows(items),
        _plan_shared(ranges, splits, shared, tokens_per_shared_item),
        (units.first_tokens[of] + number).astype(np.int32),
        (units.starts[of] + number).astype(np.int32),
        np.concatenate([[0], np.cumsum(slot_counts)]).astype(np.int32),
    )


def _plan_decodes(
    ranges: Ranges, splits: SplitRule, tile_keys: int, window: int | None
) -> SplitPlan:
    """Returns what `plan_splits` does for one token of each sequence, without shared prefixes: the
    plan of nearly all steps, in fewer operations."""
    numbers = np.arange(len(ranges), dtype=np.int32)
    ends = ranges.starts + 1
    seen_begins = 0 if window is None else ends - window
    begins = np.maximum(seen_begins, 0)
    split = splits.split_tokens(_seen(ends, window))
    first_splits = begins // split
    num_splits = ranges.starts // split + 1 - first_splits
    of_each = SplitItem(numbers, 1, ranges.batch_slots, 0, ends, seen_begins, ends, 0)
    first_slots = np.zeros(len(ranges) + 1, np.int32)
    np.cumsum(num_splits, out=first_slots[1:])
    of = np.repeat(numbers, num_splits)
    items = _rows(of_each)[of]
    _, _, _, item_begins, item_ends, _, _, slots = items.T
    np.subtract(np.arange(len(of), dtype=np.int32), first_slots[of], out=slots)
    split_of = split[of]
    edges = slots * split_of
    item_begins[:] = edges
    if window is not None:
        edges += (first_splits * split)[of]
        item_begins[:] = np.maximum(edges, (begins // tile_keys * tile_keys)[of])
    item_ends[:] = np.minimum(item_ends, edges + split_of)
    return SplitPlan(
        items,
        np.empty((0, ITEM_FIELDS), np.int32),
        ranges.first_tokens.astype(np.int32),
        ranges.starts.astype(np.int32),
        first_slots,
    )


def _seen(contexts: IntArray, window: int | None) -> IntArray:
    """Returns how many of the tokens of contexts are seen."""
    return contexts if window is None else np.minimum(contexts, window)


def _cut_by_split(
    units: Ranges, splits: SplitRule, window: int | None
) -> tuple[Ranges, IntArray, IntArray]:
    """Cuts units whose tokens have several splits, so that those of a draft are those of the same
    token decoded. Returns the pieces, the split of each, and its unit."""
    split = splits.split_tokens(_seen(units.starts + 1, window))
    lasts = splits.split_tokens(_seen(units.starts + units.num_queries, window))
    if np.array_equal(split, lasts):
        return units, split, np.arange(len(units))
    of, number = _expand(units.num_queries)
    of_tokens = splits.split_tokens(_seen(units.starts[of] + number + 1, window))
    pieces, of = units.cut_by(of_tokens)
    return pieces, splits.split_tokens(_seen(pieces.starts + 1, window)), of


def _plan_shared(
    ranges: Ranges, splits: SplitRule, shared: Sequence[SharedPrefix], tokens_per_item: int
) -> Int32Array:
    items, first_member = [np.empty((0, ITEM_FIELDS), np.int32)], 0
    for prefix in shared:
        contexts = ranges.starts[prefix.members] + ranges.num_queries[prefix.members]
        (split_tokens,) = set(splits.split_tokens(contexts).tolist())
        num_members = int(ranges.num_queries[prefix.members].sum())
        offsets = np.arange(0, num_members, tokens_per_item)
        for slot in range(prefix.num_tokens // split_tokens):
            begin, end = slot * split_tokens, (slot + 1) * split_tokens
            item = SplitItem(
                first_member=first_member + offsets,
                num_members=np.minimum(num_members - offsets, tokens_per_item),
                batch_slot=ranges.batch_slots[prefix.members[0]],
                begin=begin,
                end=end,
                seen_begin=begin,
                seen_end=end,
                slot=slot,
            )
            items.append(_rows(item))
        first_member += num_members
    return np.concatenate(items)


def plan_tiles(
    ranges: Ranges,
    tokens_per_tile: int,
    splits: SplitRule | None = None,
    window: int | None = None,
) -> Int32Array:
    """Returns the work of `paged_prefill`: `[num_tiles, TILE_FIELDS]`, rows of `PrefillTile`, the
    longest contexts first, so that no long tile runs last.

    Args:
        splits: rule of the splits whose partial results are merged, by the tokens that each token
            sees of `window`; None: none are.
    """
    if not len(ranges):
        return np.empty((0, TILE_FIELDS), np.int32)
    tiles, _ = _cut(ranges, tokens_per_tile)
    split: IntArray = np.zeros(len(tiles), np.int64)
    if splits is not None:
        tiles, split, _ = _cut_by_split(tiles, splits, window)
    order = np.argsort(-(tiles.starts + tiles.num_queries), kind="stable")
    tiles = tiles[order]
    return _rows(
        PrefillTile(
            first_token=tiles.first_tokens,
            num_tokens=tiles.num_queries,
            batch_slot=tiles.batch_slots,
            start=tiles.starts,
            last_key=0 if tiles.last_keys is None else tiles.last_keys,
            split_tokens=split[order],
        )
    )


def _rows(fields: SplitItem | PrefillTile) -> Int32Array:
    """Packs columns, of which some may be one number for all rows."""
    (num_rows,) = {len(column) for column in fields if isinstance(column, np.ndarray)}
    rows = np.empty((num_rows, len(fields)), np.int32)
    for i, column in enumerate(fields):
        rows[:, i] = column
    return rows


def _cut(ranges: Ranges, num_tokens: int) -> tuple[Ranges, IntArray]:
    """Cuts ranges into pieces of at most `num_tokens`. Returns them, and the range of each."""
    counts = -(-ranges.num_queries // num_tokens)
    if (counts == 1).all():
        return ranges, np.arange(len(ranges))
    of, number = _expand(counts)
    offsets = number * num_tokens
    pieces = Ranges(
        ranges.batch_slots[of],
        ranges.starts[of] + offsets,
        np.minimum(ranges.num_queries[of] - offsets, num_tokens),
        ranges.first_tokens[of] + offsets,
        None if ranges.last_keys is None else ranges.last_keys[of],
    )
    return pieces, of


def _expand(counts: IntArray) -> tuple[IntArray, IntArray]:
    """Returns, for `counts[i]` copies of each i, that i and the number of the copy."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
