"""Decode steps as recorded graphs: one launch instead of hundreds.

A graph always works on the same memory, so there is one set of inputs as large as the largest
batch, of which a step fills the beginning; and one graph for each size of a ladder, a step taking
the smallest that holds it. Rows behind the step's own are padding, which attends to nothing and
writes nothing. Knows nothing of scheduling, nor of what a model computes.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Protocol

import torch

from baton.engine.attention.interface import RaggedBatch

Step = Callable[[], torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]

_WARM_UPS = 2


class Recorder(Protocol):
    """Makes a step repeatable."""

    def record(self, step: Step) -> Step:
        """Runs the step and returns what repeats it on the memory it used, output included."""
        ...


class StaticBatch(Protocol):
    """The attention of decode steps, on memory that stays. New, it is all padding."""

    def fill(self, ragged: RaggedBatch, num_rows: int) -> bool:
        """Takes a step's decodes; rows from their number to `num_rows` become padding. False: it
        has no room for them, and is not to be used."""
        ...

    def rows(self, num_rows: int) -> Any:
        """The first rows, as the model is given them."""
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is compiled or allocated once is, before
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class DecodeGraphs:
    """The recorded decode steps of one model."""

    def __init__(
        self,
        forward: Forward,
        batch: StaticBatch,
        max_rows: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """Args: forward: the model's; batch: for up to `max_rows` decodes."""
        self._batch = batch
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        rows = torch.arange(max_rows, device=device)
        self.sizes = ladder(max_rows)

        def step(size: int) -> Step:
            inputs = (self._token_ids[:size], self._positions[:size])
            return lambda: forward(*inputs, batch.rows(size), rows[:size])

        # The largest first, whose memory the others find.
        self._steps = {size: recorder.record(step(size)) for size in reversed(self.sizes)}

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, ragged: RaggedBatch
    ) -> torch.Tensor | None:
        """Logits `[num_decodes, vocab_size]`, valid until the next run. None: this step has to be
        computed otherwise.

        Args:
            token_ids, positions: `[num_decodes]`, at most `max_rows`.
            ragged: decodes alone.
        """
        num_decodes = len(token_ids)
        size = self.sizes[bisect_left(self.sizes, num_decodes)]
        self._token_ids[:num_decodes].copy_(token_ids, non_blocking=True)
        self._positions[:num_decodes].copy_(positions, non_blocking=True)
        if not self._batch.fill(ragged, size):
            return None
        return self._steps[size]()[:num_decodes]


def ladder(max_rows: int) -> list[int]:
    """Batch sizes to record: steps of an eighth to a half, so that little is padding."""
    sizes = {1, 2, 4, 8, max_rows}
    size = 8
    while size < max_rows:
        size += max(8, size // 8 // 8 * 8)
        sizes.add(min(size, max_rows))
    return sorted(size for size in sizes if size <= max_rows)
