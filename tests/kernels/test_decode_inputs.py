"""Inputs of recorded decode steps: compiled code writes what numpy does, to the last number."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from baton_kernels.attention.decode_inputs import DecodeInputs, KindInputs
from baton_kernels.attention.plan import Ranges, SharedPrefix
from baton_kernels.attention.plan_arrays import SplitCapacity
from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.cpu import decode_inputs as compiled
from baton_kernels.cpu.library import NoLibraryError

MAX_ROWS, BLOCK_SIZE = 9, 4
RULES = st.sampled_from([SplitRule.fixed(32), SplitRule(16, 5), SplitRule(32, 2)])
DECODES = st.lists(
    st.tuples(st.integers(0, MAX_ROWS - 1), st.integers(0, 300)),
    max_size=MAX_ROWS,
    unique_by=lambda decode: decode[0],
)
WINDOWS = st.lists(st.none() | st.integers(1, 200), min_size=1, max_size=3)


def inputs_of(make, windows, splits, max_items, max_partials=99):
    capacity = SplitCapacity(max_items, 2 * MAX_ROWS, MAX_ROWS)
    kinds = [KindInputs(capacity, max_partials, 4, splits, 8, 2, window, 3) for window in windows]
    return make(2, MAX_ROWS, BLOCK_SIZE, kinds)


def written(layout, decodes, tables, num_rows, shared=()):
    batch_slots, starts = np.array(decodes, np.int64).reshape(-1, 2).T.copy()
    inputs = np.full(layout.size, -7, np.int32)
    ranges = Ranges.of_batch(batch_slots, starts, np.ones_like(batch_slots))
    end = layout.write(inputs, ranges, tables, num_rows, shared)
    return end, None if end is None else inputs[:end].tolist()


@pytest.mark.system
@given(
    DECODES,
    WINDOWS,
    RULES,
    st.integers(0, 3),
    st.sampled_from([4, 99]),
    st.sampled_from([4, 99]),
    st.lists(st.integers(0, 2), min_size=MAX_ROWS, max_size=MAX_ROWS),
)
def test_compiled_decode_inputs_equal_those_of_numpy(
    decodes, windows, splits, num_padded, max_items, max_partials, prefixes
):
    random = np.random.default_rng(len(decodes))
    tables = [random.integers(1, 999, (MAX_ROWS, 76)).astype(np.int32) for _ in range(2)]
    num_rows = min(MAX_ROWS, len(decodes) + num_padded)
    prefix_of = dict(zip(range(len(decodes)), prefixes, strict=False))  # 0: of none
    shared = [found for number in (1, 2) for found in shared_by(decodes, splits, prefix_of, number)]
    of_kinds = [[] if window else shared for window in windows]
    one, other = (
        written(
            inputs_of(make, windows, splits, max_items, max_partials),
            decodes,
            tables,
            num_rows,
            of_kinds,
        )
        for make in (DecodeInputs, compiled.CompiledDecodeInputs)
    )
    assert one == other


def shared_by(decodes, splits, prefix_of, number):
    """Yields the longest prefixes that decodes with this number and the same split may share."""
    members = {}
    for i, (_, start) in enumerate(decodes):
        (split,) = splits.split_tokens(np.array([start + 1])).tolist()
        if prefix_of[i] == number and start >= split:
            members.setdefault(split, []).append(i)
    for split, indices in members.items():
        num_tokens = min(decodes[i][1] for i in indices) // split * split
        yield SharedPrefix(np.array(indices, np.int64), num_tokens)


def test_decode_inputs_are_written_by_numpy_without_compiler(monkeypatch):
    def missing(_):
        raise NoLibraryError("there is no C compiler for this test")

    monkeypatch.setattr(compiled, "load", missing)
    layout = inputs_of(compiled.decode_inputs, [None], SplitRule.fixed(32), 99)
    assert type(layout) is DecodeInputs
    end, inputs = written(layout, [(2, 5)], [np.ones((MAX_ROWS, 9), np.int32)] * 2, 1)
    assert inputs[:2] == [5, 0]
    assert end == len(inputs)
