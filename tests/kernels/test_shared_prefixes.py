"""Prefixes that running sequences share: the longest ones, found without a second comparison."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kernels.attention.cascade import SharedPrefixes, SharingCost
from baton_kernels.attention.plan import Ranges
from baton_kernels.attention.split_rule import SplitRule

NUM_SLOTS, MAX_BLOCKS, BLOCK_SIZE, SPLIT = 6, 24, 16, 64
ANY = SharingCost(members_per_tile=99, token_bytes=1, launch_bytes=0)
LAUNCH_BYTES = 2**24
SPLITS = SplitRule.fixed(SPLIT)


def decodes(slots: list[int], starts: list[int]) -> Ranges:
    return Ranges.of_batch(np.array(slots), np.array(starts), np.ones(len(slots), np.int64))


def found(prefixes: SharedPrefixes, *step) -> list[tuple[list[int], int]]:  # type: ignore[no-untyped-def]
    return [(prefix.members.tolist(), prefix.num_tokens) for prefix in prefixes.find(*step)]


def faster(num_members: int, num_tokens: int, members_per_tile: int) -> bool:
    cost = SharingCost(members_per_tile, 2 * 8 * 128 * 2, LAUNCH_BYTES)
    return bool(cost.is_faster(np.array([num_members]), np.array([num_tokens]))[0])


def test_prefix_sharing_pays_when_it_saves_more_than_launch() -> None:
    assert not faster(1, 10**6, 16)
    assert not faster(2, 512, 16)
    assert faster(64, 512, 16)
    assert faster(2, 32768, 16)
    assert not faster(64, 512, 1)


def test_shared_prefixes_are_found_in_block_tables() -> None:
    tables = np.zeros((6, 20), np.int32)
    tables[[0, 2, 5], :8] = np.arange(1, 9)
    tables[[0, 2, 5], 8:12] = [[9, 10, 11, 12], [9, 10, 11, 13], [9, 10, 14, 15]]
    tables[[1, 3], :12] = np.arange(20, 32)
    tables[4, :12] = np.arange(40, 52)
    ranges = decodes([5, 4, 2, 3, 0, 1], [190] * 6)
    large, small = (
        SharedPrefixes(6, 16, SPLITS, SharingCost(16, token_bytes, LAUNCH_BYTES))
        for token_bytes in (2**20, 1)
    )
    assert found(large, ranges, tables) == [([0, 2, 4], 128), ([3, 5], 192 - SPLIT)]
    assert found(small, ranges, tables) == []


@pytest.mark.parametrize("start", [63, 64, 65])
def test_shared_prefix_ends_before_first_query(start: int) -> None:
    tables = np.tile(np.arange(1, 9, dtype=np.int32), (2, 1))
    prefixes = SharedPrefixes(2, 16, SPLITS, ANY)
    expected = [([0, 1], 64)] if start >= 64 else []
    assert found(prefixes, decodes([0, 1], [start, 100]), tables) == expected


# Two groups of three rows.
FIRST_ROWS = np.where(np.arange(MAX_BLOCKS) < 12, [[1], [2]], 0).astype(np.int32)


@dataclass
class Rows:
    """Block tables of sequences that come, go and grow; of few blocks, so that many are alike."""

    table: np.ndarray = field(default_factory=lambda: np.repeat(FIRST_ROWS, 3, axis=0))
    rewrites: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SLOTS, np.int64))
    lengths: list[int] = field(default_factory=lambda: [12] * NUM_SLOTS)
    starts: list[int] = field(default_factory=lambda: [150] * NUM_SLOTS)

    def change(self, kind: str, slot: int, other: int, number: int) -> None:
        row, length = self.table[slot], self.lengths[slot]
        if kind == "join":  # with the blocks of another, from some block on with its own
            length = self.lengths[slot] = self.lengths[other]
            row[:] = self.table[other]
            row[number:length] = 1 + number % 2
            self.rewrites[slot] += 1
            self.starts[slot] = length * BLOCK_SIZE - 1
        elif kind == "append" and length < MAX_BLOCKS:
            row[length] = 1 + number % 2
            self.lengths[slot] += 1
        elif kind == "compute":
            self.starts[slot] = min(self.starts[slot] + number, length * BLOCK_SIZE)
        elif kind == "copy":
            row[number % length] = 3
            self.rewrites[slot] += 1


def longest(
    rows: Rows, splits: SplitRule, slots: list[int], num_queries: list[int]
) -> list[tuple[list[int], int]]:
    """Returns the prefixes by comparing all rows, block by block."""
    candidates = [
        i
        for i, slot in enumerate(slots)
        if num_queries[i] == 1 and rows.starts[slot] >= splits.least
    ]
    of_slots = splits.split_tokens(np.array(rows.starts) + 1)
    groups = [(int(rows.table[slots[i], 0]), int(of_slots[slots[i]])) for i in candidates]
    prefixes = []
    for group in sorted(set(groups)):
        members = [i for i, other in zip(candidates, groups, strict=True) if other == group]
        common = min(rows.starts[slots[i]] for i in members) // BLOCK_SIZE
        of_members = [rows.table[slots[i], :common].tolist() for i in members]
        equal = [len(set(blocks)) == 1 for blocks in zip(*of_members, strict=True)]
        num_blocks = [*equal, False].index(False)
        num_tokens = num_blocks * BLOCK_SIZE // group[1] * group[1]
        if len(members) > 1 and num_tokens:
            prefixes.append((members, num_tokens))
    return prefixes


SLOTS = st.integers(0, NUM_SLOTS - 1)
CHANGES = st.tuples(
    st.sampled_from(["join", "append", "compute", "copy"]), SLOTS, SLOTS, st.integers(1, MAX_BLOCKS)
)
STEPS = st.tuples(
    st.lists(CHANGES, max_size=6),
    st.permutations(range(NUM_SLOTS)),
    st.integers(2, NUM_SLOTS),
    st.integers(0, NUM_SLOTS),  # the range with a draft, if there are so many
    st.booleans(),
)


@given(st.lists(STEPS, max_size=20), st.sampled_from([SPLITS, SplitRule(32, 6)]))
def test_prefixes_followed_equal_those_found_by_comparing_all(  # type: ignore[no-untyped-def]
    steps, splits: SplitRule
) -> None:
    rows, prefixes = Rows(), SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, splits, ANY)
    for changes, order, num_running, drafting, knows in steps:
        for change in changes:
            rows.change(*change)
        slots = order[:num_running]
        num_queries = [1 + (i == drafting) for i in range(num_running)]
        ranges = Ranges.of_batch(
            np.array(slots), np.array([rows.starts[s] for s in slots]), np.array(num_queries)
        )
        rewrites = rows.rewrites.copy() if knows else None
        expected = longest(rows, splits, slots, num_queries)
        assert found(prefixes, ranges, rows.table, rewrites) == expected


@pytest.fixture
def table() -> np.ndarray:
    """Two groups of three rows, which differ in their blocks from 20 on."""
    table = np.arange(1, 1 + NUM_SLOTS * MAX_BLOCKS, dtype=np.int32).reshape(NUM_SLOTS, MAX_BLOCKS)
    table[:3, :20], table[3:, :20] = table[0, :20], table[3, :20]
    return table


def test_rows_of_unchanged_members_are_not_read_again(table: np.ndarray) -> None:
    prefixes, rewrites = SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, SPLITS, ANY), np.zeros(NUM_SLOTS)
    step = decodes([*range(NUM_SLOTS)], [350] * NUM_SLOTS)
    expected = [([0, 1, 2], 320), ([3, 4, 5], 320)]
    assert found(prefixes, step, table, rewrites) == expected
    nothing = np.full_like(table, -1)
    assert found(prefixes, step, nothing, rewrites) == expected
    later = decodes([*range(NUM_SLOTS)], [380] * NUM_SLOTS)
    assert found(prefixes, later, nothing, rewrites) == expected


def test_member_that_joins_is_compared_with_leader_alone(table: np.ndarray) -> None:
    prefixes, rewrites = SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, SPLITS, ANY), np.zeros(NUM_SLOTS)
    found(prefixes, decodes([0, 1, 3, 4, 5], [350] * 5), table, rewrites)
    table[2, 9] = 999
    table[[1, 3, 4, 5], 1:] = np.arange(4)[:, None]  # what is not read may be anything
    joined = decodes([0, 1, 2, 3, 4, 5], [350] * 6)
    assert found(prefixes, joined, table, rewrites) == [([0, 1, 2], 128), ([3, 4, 5], 320)]
    left = decodes([0, 1, 3, 4, 5], [350] * 5)
    assert found(prefixes, left, table, rewrites) == [([0, 1], 320), ([2, 3, 4], 320)]


def test_equal_rows_are_compared_on_where_they_have_grown(table: np.ndarray) -> None:
    prefixes, rewrites = SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, SPLITS, ANY), np.zeros(NUM_SLOTS)
    assert found(prefixes, decodes([0, 1], [200, 300]), table, rewrites) == [([0, 1], 192)]
    table[1, 1:12] = 0  # compared already
    assert found(prefixes, decodes([0, 1], [260, 360]), table, rewrites) == [([0, 1], 256)]
    assert found(prefixes, decodes([0, 1], [370, 380]), table, rewrites) == [([0, 1], 320)]


def test_equal_rows_are_compared_no_further_than_their_group(table: np.ndarray) -> None:
    """A row of the short group has no block yet where one of the long group is compared."""
    prefixes, rewrites = SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, SPLITS, ANY), np.zeros(NUM_SLOTS)
    filled, table[1, 8:] = table[1, 8:].copy(), 0
    short = decodes([0, 1, 3, 4], [130, 130, 350, 350])
    assert found(prefixes, short, table, rewrites) == [([0, 1], 128), ([2, 3], 320)]
    table[1, 8:] = filled
    long = decodes([0, 1, 3, 4], [350] * 4)
    assert found(prefixes, long, table, rewrites) == [([0, 1], 320), ([2, 3], 320)]


def test_members_follow_sequences_to_other_rows_of_the_batch(table: np.ndarray) -> None:
    prefixes, rewrites = SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, SPLITS, ANY), np.zeros(NUM_SLOTS)
    for slots, members in (([0, 3, 4, 5], [1, 2, 3]), ([3, 0, 4, 5], [0, 2, 3])):
        step = decodes(slots, [350] * 4)
        assert found(prefixes, step, table, rewrites) == [(members, 320)]
    drafting = Ranges.of_batch(step.batch_slots, step.starts, np.array([1, 2, 1, 1]))
    assert found(prefixes, drafting, table, rewrites) == [(members, 320)]
    moved = Ranges.of_batch(np.array([0, 3, 4, 5]), step.starts, np.array([2, 1, 1, 1]))
    assert found(prefixes, moved, table, rewrites) == [([1, 2, 3], 320)]


def test_rows_are_compared_anew_when_their_leader_is_gone(table: np.ndarray) -> None:
    """The leader's row differs early from all others, which share more once it is gone."""
    prefixes, rewrites = SharedPrefixes(NUM_SLOTS, BLOCK_SIZE, SPLITS, ANY), np.zeros(NUM_SLOTS)
    table[0, 8:] = np.arange(900, 900 + MAX_BLOCKS - 8)
    assert found(prefixes, decodes([0, 1, 2], [350] * 3), table, rewrites) == [([0, 1, 2], 128)]
    assert found(prefixes, decodes([1, 2], [350] * 2), table, rewrites) == [([0, 1], 320)]
    rewrites[1] += 1
    table[1, 4] = 999
    assert found(prefixes, decodes([1, 2], [350] * 2), table, rewrites) == [([0, 1], 64)]
