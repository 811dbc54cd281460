"""Plans of attention: every token's keys exactly once, whatever the batch."""

import itertools
from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_kernels.attention.plan import Ranges, SharedPrefix, SplitItem, plan_splits, plan_tiles
from baton_kernels.attention.plan_arrays import SplitArrays, SplitCapacity, pack
from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import choose_tiling

KEYS = 16
RULES = st.sampled_from([SplitRule.fixed(64), SplitRule(16, 5), SplitRule(64, 2)])
SPANS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=8)
DECODES = st.lists(st.tuples(st.integers(0, 300), st.just(1)), min_size=1, max_size=8)


def batch(ranges: list[tuple[int, int]]) -> Ranges:
    starts, counts = (np.array(column) for column in zip(*ranges, strict=True))
    return Ranges.of_batch(np.arange(len(ranges)) + 3, starts, counts)


def prefixes(ranges: Ranges, splits: SplitRule, num_splits: int) -> list[SharedPrefix]:
    """Returns a prefix of so many splits for the ranges that have one split, and see it."""
    first, last = (splits.split_tokens(ranges.starts + n) for n in (1, ranges.num_queries))
    found = []
    for split in set(first.tolist()):
        is_member = (first == split) & (last == split) & (ranges.num_queries > 0)
        members = np.flatnonzero(is_member & (ranges.starts >= split * num_splits))
        found += [SharedPrefix(members, split * num_splits)] * bool(len(members) and num_splits)
    return found


@given(
    SPANS | DECODES, RULES, st.integers(1, 16), st.none() | st.integers(1, 200), st.integers(0, 2)
)
def test_plan_splits_covers_keys_of_token_once_in_order(
    ranges: list[tuple[int, int]],
    splits: SplitRule,
    tokens_per_item: int,
    window: int | None,
    num_shared: int,
) -> None:
    asked = batch(ranges)
    shared = prefixes(asked, splits, num_shared if window is None else 0)
    plan = plan_splits(asked, splits, KEYS, tokens_per_item, window, shared, 3)
    covered: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(plan.num_slots)}
    for item in itertools.starmap(SplitItem, [*plan.items.tolist(), *plan.shared_items.tolist()]):
        assert item.begin % KEYS == 0
        for member in range(item.first_member, item.first_member + item.num_members):
            assert item.seen_end <= plan.positions[member] + 1
            assert item.seen_begin >= (0 if window is None else plan.positions[member] - window + 1)
            assert plan.first_slots[member] + item.slot < plan.first_slots[member + 1]
            covered[int(plan.first_slots[member]) + item.slot].append((item.begin, item.end))
    assert all(len(parts) == 1 for parts in covered.values())
    assert sorted(plan.members.tolist()) == list(range(int(asked.num_queries.sum())))
    for member, position in enumerate(plan.positions.tolist()):
        slots = range(plan.first_slots[member], plan.first_slots[member + 1])
        parts = [covered[slot][0] for slot in slots]
        first = 0 if window is None else max(position - window + 1, 0)
        assert parts[0][0] <= first
        assert parts[-1][1] > position
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
        most = position + tokens_per_item  # what the last token of its program sees
        bound = splits.max_splits(most if window is None else min(most, window))
        assert len(parts) <= bound + (0 if window is None else 2)
        # Alone, too, the partial results of what it sees begin where they do in the batch.
        alone = plan_splits(batch([(position, 1)]), splits, KEYS, 1, window)
        edges = [item.begin for item in itertools.starmap(SplitItem, alone.items.tolist())]
        seen = [begin for begin, end in parts if begin <= position and end > first]
        assert seen[1:] == edges[1:]


@given(DECODES, RULES, st.none() | st.integers(1, 200))
def test_plan_splits_of_decodes_equals_that_of_any_ranges(
    ranges: list[tuple[int, int]], splits: SplitRule, window: int | None
) -> None:
    """A sequence without a token adds no work, but keeps all others out of the plan of decodes."""
    got = plan_splits(batch(ranges), splits, KEYS, 4, window)
    expected = plan_splits(batch([*ranges, (0, 0)]), splits, KEYS, 4, window)
    for field in fields(got):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@given(SPANS, st.integers(1, 16), st.none() | RULES, st.none() | st.integers(1, 200))
def test_plan_tiles_covers_every_token_longest_first(
    ranges: list[tuple[int, int]],
    tokens_per_tile: int,
    splits: SplitRule | None,
    window: int | None,
) -> None:
    asked = batch(ranges)
    tiles = plan_tiles(asked, tokens_per_tile, splits, window).tolist()
    found = {}
    for first, count, batch_slot, position, _, split in tiles:
        assert 1 <= count <= tokens_per_tile
        seen = np.minimum(np.arange(position, position + count) + 1, window or 999)
        assert {split} == ({0} if splits is None else {*splits.split_tokens(seen).tolist()})
        found |= {first + i: (batch_slot, position + i) for i in range(count)}
    expected = [
        (3 + i, start + step) for i, (start, count) in enumerate(ranges) for step in range(count)
    ]
    assert [found[token] for token in range(len(expected))] == expected
    assert sum(count for _, count, *_ in tiles) == len(expected)
    ends = [position + count for _, count, _, position, *_ in tiles]
    assert ends == sorted(ends, reverse=True)


def test_ranges_are_cut_where_tokens_see_up_to_another_key() -> None:
    """Text, an image, another one side by side, text; then a chunk that ends with an image."""
    ranges = Ranges.of_batch(np.array([5, 3, 7]), np.array([10, 2, 40]), np.array([9, 4, 1]))
    last_keys = np.array([10, 13, 13, 13, 15, 15, 16, 17, 18, 2, 5, 5, 5, 40])
    cut = ranges.seeing(last_keys)
    assert cut.last_keys is not None
    columns = cut.batch_slots, cut.starts, cut.num_queries, cut.first_tokens, cut.last_keys
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (5, 10, 1, 0, 0), (5, 11, 3, 1, 13), (5, 14, 2, 4, 15), (5, 16, 3, 6, 0),
        (3, 2, 1, 9, 0), (3, 3, 3, 10, 5), (7, 40, 1, 13, 0),
    ]  # fmt: skip


@given(st.integers(1, 2**20), RULES)
def test_split_rule_doubles_least_split_until_most_hold_context(
    num_tokens: int, splits: SplitRule
) -> None:
    (split,) = splits.split_tokens(np.array([num_tokens])).tolist()
    doublings = itertools.count()
    expected = next(n for i in doublings if (n := splits.least << i) * splits.most >= num_tokens)
    assert split == expected
    assert -(-num_tokens // split) <= splits.max_splits(num_tokens)


def num_programs(num_tokens: int, num_kv_heads: int, deterministic: bool = False) -> int:
    """Returns the programs of one decode."""
    bf16 = torch.bfloat16
    tiling = choose_tiling(128, bf16, bf16, num_kv_heads, deterministic=deterministic)
    plan = plan_splits(batch([(num_tokens - 1, 1)]), tiling.splits, tiling.decode.keys, 1)
    return len(plan.items) * num_kv_heads


def test_decode_of_one_sequence_has_a_program_per_multiprocessor() -> None:
    """An H100 has 132, of which a program each reads as fast as the memory allows."""
    lengths = (2048, 4096, 5000, 32768, 65536, 131072)
    assert [num_programs(n, 8) for n in lengths] == [128, 256, 160, 256, 256, 256]
    assert [num_programs(n, 1) for n in (2048, 32768, 131072)] == [16, 256, 256]


def test_splits_of_deterministic_mode_do_not_depend_on_heads() -> None:
    lengths = (512, 16384, 16385, 131072)
    assert [num_programs(n, 1, True) for n in lengths] == [1, 32, 17, 32]
    assert [num_programs(n, 8, True) for n in lengths] == [8, 256, 136, 256]


@given(SPANS, RULES, st.integers(0, 3), st.integers(0, 3))
def test_packed_plan_is_aligned_and_empty_beyond_its_members(
    ranges: list[tuple[int, int]], splits: SplitRule, more_items: int, more_members: int
) -> None:
    plan = plan_splits(batch(ranges), splits, KEYS, 4)
    num_members = len(plan.members)
    capacity = SplitCapacity(len(plan.items) + more_items, 0, num_members + more_members)
    arrays = SplitArrays.view(torch.from_numpy(pack(plan, capacity)), capacity)
    views = (arrays.num_items, arrays.items, arrays.members, arrays.positions, arrays.first_slots)
    base = arrays.num_items.data_ptr()
    assert all((view.data_ptr() - base) % 16 == 0 for view in views)
    assert arrays.num_items[0] == len(plan.items)
    assert np.array_equal(arrays.items[: plan.items.size].numpy(), plan.items.ravel())
    assert np.array_equal(arrays.members[:num_members].numpy(), plan.members)
    assert np.array_equal(arrays.positions[:num_members].numpy(), plan.positions)
    slots = arrays.first_slots[: capacity.members + 1].numpy()
    assert np.array_equal(slots[: num_members + 1], plan.first_slots)
    assert (slots[num_members:] == plan.num_slots).all()
    unused = np.arange(num_members, capacity.members)
    assert np.array_equal(arrays.members[num_members : capacity.members].numpy(), unused)
