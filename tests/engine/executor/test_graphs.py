"""Recorded decode steps: which graph a batch takes, and that only its own rows matter."""

import re
from collections.abc import Hashable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from baton.engine.config import EngineConfig
from baton.engine.executor import triton_backend
from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.models import cuda_graphs
from baton.engine.executor.models.cuda_graphs import (
    NO_GRAPHS,
    DecodeGraphs,
    Graphs,
    Step,
    capture_sizes,
    record_decodes,
    recorded_bytes,
)

CPU = torch.device("cpu")


class FakeBatch:
    """Notes what it is filled with; its rows are the slots of a step, -1 where there is padding."""

    forms = ("plain", "sharing")

    def __init__(self, max_rows: int) -> None:
        self.batch_slots = torch.full((max_rows,), -1)
        self.positions = torch.zeros(max_rows, dtype=torch.int64)
        self.form: str | None = "plain"
        self.made: list[tuple[int, Hashable]] = []

    def fill(self, ragged: RaggedBatch, num_rows: int) -> str | None:
        if self.form is None:
            return None
        batch_slots, positions = map(torch.from_numpy, ragged.places())
        self.batch_slots[: len(batch_slots)] = batch_slots
        self.batch_slots[len(batch_slots) : num_rows] = -1
        self.positions[: len(batch_slots)] = positions
        return self.form

    def rows(self, num_rows: int, form: Hashable) -> torch.Tensor:
        self.made.append((num_rows, form))
        return self.batch_slots[:num_rows]


class FakeRecorder:
    """Counts what is recorded, and repeats it by doing it again into the same memory."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_repeated = 0

    def record(self, step: Step) -> Step:
        self.num_recorded += 1
        out = step()

        def repeat() -> torch.Tensor:
            self.num_repeated += 1
            return out.copy_(step())

        return repeat


def forward(
    token_ids: torch.Tensor, positions: torch.Tensor, batch_slots: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    assert len(token_ids) == len(positions) == len(batch_slots) == len(rows)
    return torch.stack([token_ids, positions, batch_slots, rows], dim=1)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=8))
def test_decode_graphs_run_each_batch_in_the_graph_that_fits(max_rows, sizes):
    recorder = FakeRecorder()
    graphs = DecodeGraphs(forward, FakeBatch(max_rows), capture_sizes(max_rows), CPU, recorder)
    assert recorder.num_recorded == graphs.num_graphs == 2 * len(graphs.sizes)
    for number, size in enumerate((min(size, max_rows) for size in sizes), 1):
        batch_slots = np.random.default_rng(number).permutation(max_rows)[:size]
        ragged = RaggedBatch.of_decodes(batch_slots, batch_slots + 7, [])
        got = graphs.run(torch.from_numpy(batch_slots + 100).split(7), ragged)
        assert got is not None
        expected = torch.from_numpy(batch_slots)[:, None] + torch.tensor([100, 7, 0, 0])
        expected[:, 3] = torch.arange(size)
        assert torch.equal(got, expected)
        assert recorder.num_repeated == number


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_decode_graphs_run_drafts_after_their_tokens(num_tokens: list[int]) -> None:
    recorder, counts = FakeRecorder(), np.array(num_tokens)
    graphs = DecodeGraphs(forward, FakeBatch(60), capture_sizes(12, 5), CPU, recorder)
    slots, num_decodes = np.arange(len(counts)), int((counts == 1).cumprod().sum())
    got = graphs.run(
        [torch.arange(counts.sum()) + 100],
        RaggedBatch(slots, slots * 10, counts, num_decodes, []),
    )
    positions = [10 * i + j for i, count in enumerate(num_tokens) for j in range(count)]
    rows = range(sum(num_tokens))
    expected = zip(
        [row + 100 for row in rows], positions, np.repeat(slots, counts).tolist(), rows, strict=True
    )
    assert got is not None
    assert got.tolist() == [*map(list, expected)]
    assert recorder.num_repeated == 1


def test_decode_graphs_add_the_offsets_of_one_step():
    graphs = DecodeGraphs(forward, FakeBatch(4), [4], CPU, FakeRecorder(), has_mrope=True)
    slots = np.arange(4)

    def positions(size: int, offsets: list[int] | None) -> list[int]:
        ragged = RaggedBatch.of_decodes(slots[:size], slots[:size] * 10, [])
        shift = None if offsets is None else torch.tensor(offsets)
        got = graphs.run([torch.zeros(size)], ragged, shift)
        assert got is not None
        return got[:, 1].tolist()

    assert positions(4, [0, -1, -2, -3]) == [0, 9, 18, 27]
    assert positions(2, [0, -4]) == [0, 6]
    assert positions(4, [0, 0, -1, 0]) == [0, 10, 19, 30]
    assert positions(4, None) == [0, 10, 20, 30]


def test_decode_graphs_pad_rows_left_by_a_larger_batch():
    batch = FakeBatch(8)
    graphs = DecodeGraphs(forward, batch, capture_sizes(8), CPU, FakeRecorder())
    for size in (8, 3):
        batch_slots = np.arange(size)
        graphs.run([torch.zeros(size)], RaggedBatch.of_decodes(batch_slots, batch_slots, []))
    assert batch.rows(4, "plain").tolist() == [0, 1, 2, -1]


def test_decode_graphs_run_the_form_of_the_step():
    batch, batch_slots = FakeBatch(4), np.arange(2)
    graphs = DecodeGraphs(forward, batch, [2, 4], CPU, FakeRecorder())
    assert batch.made == [(4, "plain"), (4, "sharing"), (2, "plain"), (2, "sharing")]
    for form in ("sharing", "plain", "sharing"):
        batch.form = form
        graphs.run([torch.zeros(2)], RaggedBatch.of_decodes(batch_slots, batch_slots, []))
        assert batch.made[-1] == (2, form)


def test_decode_graphs_write_logits_to_the_same_memory():
    batch = FakeBatch(8)
    graphs = DecodeGraphs(forward, batch, capture_sizes(8), CPU, FakeRecorder())
    places = set()
    for size in (8, 3, 1):
        batch_slots = np.arange(size)
        ragged = RaggedBatch.of_decodes(batch_slots, batch_slots, [])
        got = graphs.run([torch.zeros(size)], ragged)
        assert got is not None
        places.add(got.data_ptr())
    assert len(places) == 1


def test_decode_graphs_decline_a_batch_without_room():
    batch, recorder, batch_slots = FakeBatch(2), FakeRecorder(), np.arange(2)
    graphs = DecodeGraphs(forward, batch, [1, 2], CPU, recorder)
    batch.form = None
    ragged = RaggedBatch.of_decodes(batch_slots, batch_slots, [])
    assert graphs.run([torch.zeros(2)], ragged) is None
    assert recorder.num_repeated == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("not permitted when stream is capturing"), "not permitted when"),
        (torch.OutOfMemoryError("tried to allocate"), "the GPU has too little memory .*tried to"),
    ],
)
def test_decode_graphs_fall_back_to_eager_with_reason(
    caplog: pytest.LogCaptureFixture, error: RuntimeError, reason: str
) -> None:
    class Failing(FakeRecorder):
        def record(self, step: Step) -> Step:
            if self.num_recorded == 2:
                raise error
            return super().record(step)

    assert record_decodes(forward, FakeBatch(8), [1, 2, 4, 8], CPU, Failing()) is NO_GRAPHS
    assert re.search(f"without CUDA graphs, which is slower: {reason}", caplog.text)


@pytest.mark.parametrize("is_lost", [False, True])
def test_record_decodes_raises_if_the_gpu_is_lost(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """A recording that the GPU refuses is no loss of its context, whose every call fails."""
    error = torch.AcceleratorError("CUDA error: of the recording")

    def fail(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(cuda_graphs, "DecodeGraphs", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail if is_lost else lambda _device: None)
    arguments = (forward, FakeBatch(1), [1], torch.device("cuda", 0), FakeRecorder())
    if is_lost:
        with pytest.raises(torch.AcceleratorError):
            record_decodes(*arguments)
    else:
        assert record_decodes(*arguments) is NO_GRAPHS


def test_triton_backend_records_all_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further stream would take a workspace of cuBLAS."""
    recorders: list[SimpleNamespace] = []
    used: list[object] = []

    def make() -> SimpleNamespace:
        recorders.append(SimpleNamespace(use_new_pool=lambda: used.append("pool")))
        return recorders[-1]

    monkeypatch.setattr(triton_backend, "CudaRecorder", make)
    batch = SimpleNamespace(forms=("plain",))
    monkeypatch.setattr(triton_backend, "StaticTritonBatch", lambda *_args: batch)
    monkeypatch.setattr(triton_backend, "record_decodes", lambda *args, **_: used.append(args[-1]))
    backend = triton_backend.TritonBackend(EngineConfig(), [], torch.float32, 64)
    for sizes in ([4], [1, 2, 4]):
        part: Any = SimpleNamespace(device=CPU, forward=forward, has_mrope=False)
        backend._record(part, part, sizes)
    assert used == ["pool", recorders[0], "pool", recorders[0]]
    assert backend.num_expected_graphs == 3


def test_recorded_bytes_are_those_of_the_largest() -> None:
    taken, recorded = [1000], []  # by torch, in bytes

    def record(sizes: Sequence[int]) -> Graphs:
        taken[0] += 500
        recorded.extend(sizes)
        return record_decodes(forward, FakeBatch(8), sizes, CPU, FakeRecorder())

    assert recorded_bytes(record, [1, 2, 4, 8], lambda: taken[0]) == 500
    assert recorded == [8]
    assert recorded_bytes(lambda _sizes: NO_GRAPHS, [1, 2], lambda: taken[0]) == 0


@given(st.integers(1, 2000), st.integers(1, 16))
def test_ladder_reaches_the_largest_batch_in_small_steps(max_num_seqs, max_decode_tokens):
    """Up to 512 tokens, or all sequences with one token each."""
    sizes = capture_sizes(max_num_seqs, max_decode_tokens)
    assert sizes[0] == 1
    assert max_num_seqs <= sizes[-1] <= max_num_seqs * max_decode_tokens
    assert sizes[-1] in (max_num_seqs, max_num_seqs * max_decode_tokens, 512)
    assert all(small < large <= max(2 * small, small + 8) for small, large in pairwise(sizes))
    assert len(sizes) < 70
