"""Plans of attention: every token's keys exactly once, whatever the batch."""

import itertools
from dataclasses import fields

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_kernels.attention_plan import Ranges, SharedPrefix, SplitItem, plan_splits, plan_tiles
from baton_kernels.attention_plan_arrays import SplitArrays, SplitCapacity, pack
from baton_kernels.attention_tiling import choose_tiling

SPLIT, KEYS = 64, 16
SPANS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=8)
DECODES = st.lists(st.tuples(st.integers(0, 300), st.just(1)), min_size=1, max_size=8)


def batch(ranges: list[tuple[int, int]]) -> Ranges:
    starts, counts = (np.array(column) for column in zip(*ranges, strict=True))
    return Ranges.of_batch(np.arange(len(ranges)) + 3, starts, counts)


@given(SPANS | DECODES, st.integers(1, 16), st.none() | st.integers(1, 200), st.integers(0, 2))
def test_plan_splits_covers_keys_of_token_once_in_order(
    ranges: list[tuple[int, int]], tokens_per_item: int, window: int | None, num_shared: int
) -> None:
    asked = batch(ranges)
    members = np.flatnonzero(asked.starts >= SPLIT * num_shared)
    shared = []
    if num_shared and len(members) and window is None:
        shared = [SharedPrefix(members, SPLIT * num_shared)]
    plan = plan_splits(asked, SPLIT, KEYS, tokens_per_item, window, shared, 3)
    covered: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(plan.num_slots)}
    for item in itertools.starmap(SplitItem, [*plan.items.tolist(), *plan.shared_items.tolist()]):
        assert item.begin % KEYS == 0
        assert item.begin // SPLIT == (item.end - 1) // SPLIT
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


@given(DECODES, st.none() | st.integers(1, 200))
def test_plan_splits_of_decodes_equals_that_of_any_ranges(
    ranges: list[tuple[int, int]], window: int | None
) -> None:
    """A sequence without a token adds no work, but keeps all others out of the plan of decodes."""
    got = plan_splits(batch(ranges), SPLIT, KEYS, 4, window)
    expected = plan_splits(batch([*ranges, (0, 0)]), SPLIT, KEYS, 4, window)
    for field in fields(got):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


@given(SPANS, st.integers(1, 16))
def test_plan_tiles_covers_every_token_longest_first(
    ranges: list[tuple[int, int]], tokens_per_tile: int
) -> None:
    asked = batch(ranges)
    tiles = plan_tiles(asked, tokens_per_tile).tolist()
    found = {}
    for first, count, batch_slot, position, _ in tiles:
        assert 1 <= count <= tokens_per_tile
        found |= {first + i: (batch_slot, position + i) for i in range(count)}
    expected = [
        (3 + i, start + step) for i, (start, count) in enumerate(ranges) for step in range(count)
    ]
    assert [found[token] for token in range(len(expected))] == expected
    assert sum(count for _, count, *_ in tiles) == len(expected)
    ends = [position + count for _, count, _, position, _ in tiles]
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


def test_choose_tiling_splits_by_model_unless_deterministic() -> None:
    def split(max_context: int, num_kv_heads: int, deterministic: bool = False) -> int:
        bf16 = torch.bfloat16
        tiling = choose_tiling(
            128, bf16, bf16, num_kv_heads, max_context, deterministic=deterministic
        )
        return tiling.split_tokens

    assert [split(n, 8) for n in (512, 32768, 131072)] == [256, 512, 1024]
    assert split(32768, 1) == 256
    assert {split(n, h, True) for n in (512, 131072) for h in (1, 8)} == {512}


@given(SPANS, st.integers(0, 3), st.integers(0, 3))
def test_packed_plan_is_aligned_and_empty_beyond_its_members(
    ranges: list[tuple[int, int]], more_items: int, more_members: int
) -> None:
    plan = plan_splits(batch(ranges), SPLIT, KEYS, 4)
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
    nobody = np.arange(num_members, capacity.members)
    assert np.array_equal(arrays.members[num_members : capacity.members].numpy(), nobody)
