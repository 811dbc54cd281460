"""CUDA graphs of decode steps: one launch instead of hundreds.

A graph works on fixed memory, so all graphs share static inputs for the largest batch, whose first
rows a step fills. There is one graph per captured batch size; a step replays the smallest that fits
it. The remaining rows are padding, which attends to nothing and writes nothing.
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
    """Recorder of steps for replay."""

    def record(self, step: Step) -> Step:
        """Runs the step and returns its replay, on the same memory, output included."""
        ...


class StaticBatch(Protocol):
    """Attention inputs of decode steps in static memory; initially all rows are padding."""

    def fill(self, ragged: RaggedBatch, num_rows: int) -> bool:
        """Writes a step's decodes; the following rows, up to `num_rows`, become padding. Returns
        False if they do not fit: then this must not be used."""
        ...

    def rows(self, num_rows: int) -> Any:
        """Returns the first rows, in the form that the model takes."""
        ...


class CudaRecorder:
    """Recorder of CUDA graphs. They share a memory pool, so only one of them may run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and allocates before the capture
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
    """CUDA graphs of one model's decode steps, by batch size."""

    def __init__(
        self,
        forward: Forward,
        batch: StaticBatch,
        max_rows: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        """Args: forward: the model's forward; batch: static inputs for up to `max_rows` decodes."""
        self._batch = batch
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        rows = torch.arange(max_rows, device=device)
        self.sizes = capture_sizes(max_rows)

        def step(size: int) -> Step:
            inputs = (self._token_ids[:size], self._positions[:size])
            return lambda: forward(*inputs, batch.rows(size), rows[:size])

        # The largest first, so that the others reuse its memory in the pool.
        self._steps = {size: recorder.record(step(size)) for size in reversed(self.sizes)}

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, ragged: RaggedBatch
    ) -> torch.Tensor | None:
        """Returns logits `[num_decodes, vocab_size]`, valid until the next run; None if no graph
        fits and the caller has to compute the step without one.

        Args:
            token_ids, positions: `[num_decodes]`, at most `max_rows`.
            ragged: batch of only decodes.
        """
        num_decodes = len(token_ids)
        size = self.sizes[bisect_left(self.sizes, num_decodes)]
        self._token_ids[:num_decodes].copy_(token_ids, non_blocking=True)
        self._positions[:num_decodes].copy_(positions, non_blocking=True)
        if not self._batch.fill(ragged, size):
            return None
        return self._steps[size]()[:num_decodes]


def capture_sizes(max_rows: int) -> list[int]:
    """Returns the batch sizes to capture, an eighth to a half apart, so that padding is small."""
    sizes = {1, 2, 4, 8, max_rows}
    size = 8
    while size < max_rows:
        size += max(8, size // 8 // 8 * 8)
        sizes.add(min(size, max_rows))
    return sorted(size for size in sizes if size <= max_rows)
