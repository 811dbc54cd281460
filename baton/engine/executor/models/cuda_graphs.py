"""CUDA graphs of decode steps: one launch instead of hundreds.

A graph works on fixed memory, so all graphs share static inputs for the largest batch, whose first
rows a step fills. A row is a token: a decode has one, or several with its drafts. There is one
graph per captured batch size; a step replays the smallest that fits it. The remaining rows are
padding, which attends to nothing and writes nothing.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch

from baton.engine.executor.attention.interface import RaggedBatch
from baton.engine.executor.device import is_out_of_memory

logger = logging.getLogger(__name__)

Step = Callable[[], torch.Tensor]
Forward = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]

_WARM_UPS = 2
# With more tokens of drafts a step computes for longer than its launches take the host.
_MOST_WITH_DRAFTS = 512
_SHORT_OF_MEMORY: Final = (
    "the GPU has too little memory to record them (set a smaller gpu_memory_utilization or "
    "max_num_seqs): "
)


class Recorder(Protocol):
    """Recorder of steps for replay."""

    def record(self, step: Step) -> Step:
        """Runs the step and returns its replay, on the same memory, output included."""
        ...


class StaticBatch(Protocol):
    """Attention inputs of decode steps in static memory; initially all rows are padding.

    Attributes:
        positions: `[max_rows]`, of the tokens; valid positions in padded rows too.
    """

    positions: torch.Tensor

    @property
    def forms(self) -> Sequence[Hashable]:
        """Forms of steps, each of which launches other kernels."""
        ...

    def fill(self, ragged: RaggedBatch, num_rows: int) -> Hashable | None:
        """Writes a step's tokens; the following rows, up to `num_rows`, become padding. Returns the
        step's form; None if they do not fit: then this must not be used."""
        ...

    def rows(self, num_rows: int, form: Hashable) -> Any:
        """Returns the first rows of a step of this form, as the model takes them."""
        ...


class CudaRecorder:
    """Recorder of CUDA graphs. They share a memory pool, so only one of them may run at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # of all recordings: cuBLAS has a workspace per stream
        self.use_new_pool()

    def use_new_pool(self) -> None:
        """Begins a memory pool for the graphs that follow. Torch refuses one whose graphs are all
        gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # compiles and allocates before the capture
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads do on the GPU meanwhile does not break the capture.
        capture = torch.cuda.graph(
            graph, self._pool, self._stream, capture_error_mode="thread_local"
        )
        with capture:
            out = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class Graphs(Protocol):
    """Recorded decode steps.

    Attributes:
        max_tokens: most tokens of a step that they compute.
        num_graphs: number of the graphs.
    """

    max_tokens: int
    num_graphs: int

    def run(
        self,
        token_ids: Sequence[torch.Tensor],
        ragged: RaggedBatch,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns logits `[num_tokens, vocab_size]`, valid until the next run; None if no graph
        fits and the caller has to compute the step without one.

        Args:
            token_ids: parts of `[num_tokens]`, one after the other; at most `max_tokens`.
            ragged: batch of only decodes, some with drafts.
            offsets: `[num_tokens]`, to add to the tokens' indices for their rotary positions; None:
                nothing.
        """
        ...


class _NoGraphs:
    """`Graphs` of an engine that records none."""

    max_tokens = 0
    num_graphs = 0

    def run(self, *_: object) -> None:
        return None


NO_GRAPHS: Graphs = _NoGraphs()


class DecodeGraphs:
    """CUDA graphs of one model's decode steps, by batch size, as `Graphs`.

    Attributes:
        sizes: the batch sizes in tokens, ascending.
    """

    def __init__(
        self,
        forward: Forward,
        batch: StaticBatch,
        sizes: Sequence[int],
        device: torch.device,
        recorder: Recorder,
        *,
        has_mrope: bool = False,
    ) -> None:
        """Args: forward: the model's forward; batch: static inputs for as many tokens as the last
        of `sizes`; has_mrope: the rotary positions of tokens may be an offset away from their
        indices."""
        max_rows = sizes[-1]
        self._batch = batch
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        rows = torch.arange(max_rows, device=device)
        self._offsets = torch.zeros_like(self._token_ids) if has_mrope else None
        self._num_offsets = 0
        self.sizes = sizes
        self.max_tokens = max_rows
        self._logits: torch.Tensor | None = None

        def step(size: int, form: Hashable) -> torch.Tensor:
            positions = batch.positions[:size]
            if self._offsets is not None:
                positions = positions + self._offsets[:size]
            token_ids = self._token_ids[:size]
            return self._kept(forward(token_ids, positions, batch.rows(size, form), rows[:size]))

        # The largest first, so that the others reuse its memory in the pool.
        self._steps = {
            (size, form): recorder.record(partial(step, size, form))
            for size in reversed(self.sizes)
            for form in batch.forms
        }
        self.num_graphs = len(self._steps)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Copies a step's logits to the memory of all steps, which the first one, the largest,
        allocates: in memory of its own each graph would take as much."""
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)

    def run(
        self,
        token_ids: Sequence[torch.Tensor],
        ragged: RaggedBatch,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        num_tokens = sum(map(len, token_ids))
        size = self.sizes[bisect_left(self.sizes, num_tokens)]
        begin = 0
        for part in token_ids:
            end = begin + len(part)
            self._token_ids[begin:end].copy_(part, non_blocking=True)
            begin = end
        self._set_offsets(offsets)
        form = self._batch.fill(ragged, size)
        return None if form is None else self._steps[size, form]()[:num_tokens]

    def _set_offsets(self, offsets: torch.Tensor | None) -> None:
        """Writes a step's offsets. Those of padding are 0, as its positions are valid without."""
        num_offsets = 0 if offsets is None else len(offsets)
        if offsets is None and not self._num_offsets:
            return
        assert self._offsets is not None, "offsets of a model without M-RoPE"
        if offsets is not None:
            self._offsets[:num_offsets].copy_(offsets, non_blocking=True)
        self._offsets[num_offsets : self._num_offsets].zero_()
        self._num_offsets = num_offsets


def record_decodes(
    forward: Forward,
    batch: StaticBatch,
    sizes: Sequence[int],
    device: torch.device,
    recorder: Recorder,
    *,
    has_mrope: bool = False,
) -> Graphs:
    """Returns the graphs, as `DecodeGraphs`; none, after a warning with the reason, if the model's
    forward cannot be recorded, since it waits for the device, or memory is short. Raises the error
    of a GPU that fails."""
    try:
        return DecodeGraphs(forward, batch, sizes, device, recorder, has_mrope=has_mrope)
    except RuntimeError as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises again if the CUDA context is lost
        reason = _SHORT_OF_MEMORY if is_out_of_memory(error) else ""
        logger.warning("decode steps run without CUDA graphs, which is slower: %s%s", reason, error)
        return NO_GRAPHS


def recorded_bytes(
    record: Callable[[Sequence[int]], Graphs],
    sizes: Sequence[int],
    reserved: Callable[[], int],
) -> int:
    """Returns the memory in bytes that graphs of `sizes` take. Records the largest, and drops them:
    the others reuse their memory.

    Args:
        record: records graphs of some sizes.
        reserved: returns the memory in bytes that torch has reserved on the device.
    """
    before = reserved()
    graphs = record(sizes[-1:])
    return reserved() - before if graphs.num_graphs else 0


def capture_sizes(max_num_seqs: int, max_decode_tokens: int = 1) -> list[int]:
    """Returns the batch sizes to capture, in tokens, an eighth to a half apart, so that padding is
    small. With `max_decode_tokens` for each, the largest batches of sequences may not fit."""
    max_rows = max(max_num_seqs, min(max_num_seqs * max_decode_tokens, _MOST_WITH_DRAFTS))
    sizes = {1, 2, 4, 8, max_rows}
    size = 8
    while size < max_rows:
        size += max(8, size // 8 // 8 * 8)
        sizes.add(min(size, max_rows))
    return sorted(size for size in sizes if size <= max_rows)
