"""Recorded decode steps: what a step sends adds up to the inputs made from nothing."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from baton.engine.executor.attention import triton_attention
from baton.engine.executor.attention.device_tables import DeviceTables
from baton.engine.executor.attention.interface import Attention, RaggedBatch
from baton.engine.executor.attention.static_batch import MakeInputs, StaticTritonBatch, StepForm
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.models.cuda_graphs import DecodeGraphs
from baton.engine.executor.runner import DecoderModel
from baton.engine.request import EngineRequest
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK, BatchSlots
from baton.engine.scheduler.sequences.prompt_lookup import DraftRequest, TokenArray
from baton.sampling import SamplingParams
from baton_kernels.attention.decode_inputs import DecodeInputs
from baton_kernels.attention.plan import Ranges
from baton_kernels.attention.plan_arrays import pack
from baton_kernels.cpu.decode_inputs import CompiledDecodeInputs
from bench.engine import host
from tests.support.grids import grid

CPU = torch.device("cpu")
# Contexts of up to three splits: these double from 384 tokens on.
KV_HEADS = 85
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "release", "send"]),
        st.integers(0, 3),
        st.integers(0, 5),
        st.lists(st.integers(1, 99), max_size=3),
    ),
    max_size=30,
)


@given(CHANGES)
def test_device_tables_equal_those_of_host_for_slots_of_step(
    changes: list[tuple[str, int, int, list[int]]],
) -> None:
    columns = BatchSlots[None](4, 8, 1, 2)
    tables = DeviceTables(2, 4, 9, CPU)
    for change, batch_slot, first, block_ids in changes:
        if change == "write":
            columns.set_blocks(first % 2, batch_slot, first, block_ids)
        elif change == "release":
            columns.release(batch_slot, 8)
        else:
            batch_slots = np.unique([batch_slot, first % 4])
            tables.update(
                RaggedBatch.of_decodes(
                    batch_slots, batch_slots, columns.block_tables, columns.table_versions
                )
            )
            for sent, table in zip(tables.tensors, columns.block_tables, strict=True):
                assert np.array_equal(sent[batch_slots, :8].numpy(), table[batch_slots])


@pytest.mark.parametrize(
    ("first", "block_ids", "is_rewrite"),
    [(2, [7, 8], False), (1, [3, 7], True), (0, [0], True), (2, [], False)],
)
def test_table_rewrites_count_changes_of_blocks_alone(
    first: int, block_ids: list[int], is_rewrite: bool
) -> None:
    columns = BatchSlots[None](2, 8, 1, 2)
    columns.set_blocks(1, 0, 0, [4, 5])
    assert [counts.tolist() for counts in columns.table_rewrites] == [[0, 0], [0, 0]]
    columns.set_blocks(1, 0, first, block_ids)
    assert [counts.tolist() for counts in columns.table_rewrites] == [[0, 0], [is_rewrite, 0]]
    columns.release(0, 8)
    assert [counts.tolist() for counts in columns.table_rewrites] == [[1, 0], [1 + is_rewrite, 0]]


def test_device_tables_send_rows_of_unknown_versions_again() -> None:
    tables, slots = DeviceTables(1, 2, 2, CPU), np.arange(2)
    for content in ([[1, 2], [3, 4]], [[1, 5], [0, 4]]):
        table = np.array(content, np.int32)
        tables.update(RaggedBatch.of_decodes(slots, slots, [table]))
        assert np.array_equal(tables.tensors[0].numpy(), table)


@pytest.mark.parametrize("is_shared", [True, False])
def test_contexts_of_step_may_all_be_of_greatest_length(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they share their blocks, and so add up to a hundred times the pool."""
    monkeypatch.setattr(triton_attention, "LAUNCH_BYTES", 2**16 if is_shared else 2**62)
    with host.null_engine(CheckedBackend(DecodeInputs), num_blocks=128) as engine:
        attention = cast("TritonAttention", engine.core.runner.attention)
        assert engine.core.facts.num_graphs > 0
    num_blocks = host.MAX_LENGTH // host.BLOCK_SIZE
    tables = [np.tile(np.arange(num_blocks, dtype=np.int32), (100, 1))]
    slots, starts = np.arange(100), np.full(100, host.MAX_LENGTH - 1)
    batch = StaticTritonBatch(attention, 100, num_blocks, DecodeInputs)
    form = batch.fill(RaggedBatch.of_decodes(slots, starts, tables), 100)
    assert form is (StepForm.SHARING if is_shared else StepForm.PLAIN)


class CheckedBatch(StaticTritonBatch):
    """Static batch that compares the inputs of each step with those made from nothing."""

    num_checked = num_with_drafts = num_sharing = num_appended = num_doubled = 0
    _before: Sequence[tuple[np.ndarray, np.ndarray]] = ()  # tables and rewrites of the last step

    def fill(self, ragged: RaggedBatch, num_rows: int) -> StepForm | None:
        form = super().fill(ragged, num_rows)
        assert form is not None
        self._check_rewrites(ragged)
        CheckedBatch.num_checked += 1
        CheckedBatch.num_with_drafts += len(ragged.batch_slots) > ragged.num_decodes
        CheckedBatch.num_sharing += form is StepForm.SHARING
        CheckedBatch.num_doubled += bool((ragged.starts >= 384).any())
        batch, size = self.rows(num_rows, StepForm.SHARING), host.BLOCK_SIZE
        slots, positions = ragged.places()
        padding = num_rows - len(slots)
        assert self.positions[:num_rows].tolist() == [*positions.tolist(), *[0] * padding]
        for sent, places, table in zip(batch.tables, batch.slots, ragged.block_tables, strict=True):
            assert np.array_equal(sent[slots, : table.shape[1]].numpy(), table[slots])
            expected = table[slots, positions // size] * size + positions % size
            assert places.tolist() == [*expected.tolist(), *[0] * padding]
        ranges = Ranges.of_batch(ragged.batch_slots, ragged.starts, ragged.num_queries)
        for kind, plan in self._attention.plans(ranges, ragged.block_tables).items():
            assert not len(plan.tiles)
            assert plan.splits.num_slots <= len(batch.work[kind].workspace.acc)
            self._check_plan(batch.work[kind].arrays.splits, plan.splits)
            assert form is StepForm.SHARING or not len(plan.splits.shared_items)
        return form

    def _check_rewrites(self, ragged: RaggedBatch) -> None:
        """Rows without a rewrite since the step before begin with the blocks that they had."""
        assert ragged.table_rewrites is not None
        now = [*zip(ragged.block_tables, ragged.table_rewrites, strict=True)]
        for (before, counts), (table, rewrites) in zip(self._before, now, strict=False):
            is_appended = counts == rewrites
            had, has = before[is_appended], table[is_appended]
            assert np.array_equal(np.where(had == NULL_BLOCK, had, has), had)
            CheckedBatch.num_appended += bool((had != has).any())
        self._before = [(table.copy(), rewrites.copy()) for table, rewrites in now]

    def _check_plan(self, arrays, plan) -> None:  # type: ignore[no-untyped-def]
        capacity = arrays.capacity
        expected = arrays.view(torch.from_numpy(pack(plan, capacity)), capacity)
        assert arrays.num_items[0] == expected.num_items[0] == len(plan.items)
        assert arrays.num_shared_items[0] == expected.num_shared_items[0]
        for name, length in (
            ("items", plan.items.size),
            ("shared_items", plan.shared_items.size),
            ("members", capacity.members),
            ("positions", len(plan.members)),
            ("first_slots", capacity.members + 1),
        ):
            got = getattr(arrays, name)[:length]
            assert torch.equal(got, getattr(expected, name)[:length]), name


class CheckedBackend(host.NullBackend):
    """Backend whose recorded steps check their inputs."""

    def __init__(self, make_inputs: MakeInputs) -> None:
        super().__init__([], uses_c_kernels=False)
        self._make_batch = partial(CheckedBatch, make_inputs=make_inputs)

    def graphs(self, model: DecoderModel, attention: Attention) -> DecodeGraphs:
        return host.NullGraphs(
            cast("host.NullModel", model), cast("TritonAttention", attention), self._make_batch
        )


class RandomDrafter:
    """Drafts random tokens, as many as it may or fewer."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def propose(self, requests: Sequence[DraftRequest]) -> list[TokenArray]:
        counts = [self._random.integers(0, request.max_drafts + 1) for request in requests]
        return [self._random.integers(8, 64, count).astype(np.int32) for count in counts]


@grid(
    windows=[[None], [None, 40]],
    num_blocks=[70, 300],
    max_drafts=[0, 5],
    make_inputs=[DecodeInputs, pytest.param(CompiledDecodeInputs, marks=pytest.mark.system)],
)
def test_static_batch_equals_one_made_from_nothing(
    windows: host.Windows,
    num_blocks: int,
    max_drafts: int,
    make_inputs: MakeInputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests join, end by a token or by length, share prefixes, fork, and are preempted."""
    monkeypatch.setattr(triton_attention, "LAUNCH_BYTES", 2**23)  # shared by three short sequences
    backend = CheckedBackend(make_inputs)
    before, with_drafts = CheckedBatch.num_checked, CheckedBatch.num_with_drafts
    sharing, appended = CheckedBatch.num_sharing, CheckedBatch.num_appended
    doubled = CheckedBatch.num_doubled
    random = np.random.default_rng(num_blocks)
    prefix = tuple(random.integers(8, 64, 350).tolist())
    num_preempted = 0
    with host.null_engine(backend, num_blocks, windows, max_drafts, KV_HEADS) as engine:
        engine.core.drafter = RandomDrafter(random)
        for number in range(40):
            own = tuple(random.integers(8, 64, random.integers(1, 40)).tolist())
            tokens = prefix + own if number % 3 == 0 else own
            params = SamplingParams(
                max_tokens=int(random.integers(1, 80)),
                stop_token_ids=(host.STOP,) if number % 2 else (),
                n=2 if number % 7 == 0 else 1,
                temperature=1.0 if number % 7 == 0 else 0.0,
            )
            engine.core.add(EngineRequest(str(number), tokens, params, len(tokens)))
            for _ in range(random.integers(0, 6)):
                num_preempted += len(engine.core.step().preempted)
        while engine.core.has_work:
            num_preempted += len(engine.core.step().preempted)
        engine.core.scheduler.check_integrity()
    assert CheckedBatch.num_checked - before > 50
    assert CheckedBatch.num_doubled - doubled > 10
    assert 10 < CheckedBatch.num_sharing - sharing < CheckedBatch.num_checked - before - 10
    assert CheckedBatch.num_appended - appended > 10
    assert (CheckedBatch.num_with_drafts - with_drafts > 10) == (max_drafts > 0)
    assert bool(num_preempted) == (num_blocks == 70)
