"""Token sampling by torch operations, on any device of torch."""

import numpy as np
import torch

from baton.engine.executor.sampling.batch_state import (
    PROCESSING,
    RANDOM,
    Int64Array,
    Rows,
    SamplingColumns,
)
from baton.engine.executor.sampling.draw import draw_by_torch, to_tensor
from baton.engine.executor.sampling.logits_processors import Bitmask, Int32Array, process, restrict


class TorchChooser:
    """`Chooser` on torch operations. Keeps no state between steps."""

    keeps_history = False

    def forget(self, batch_slot: int) -> None:
        """Does nothing: there is no state per slot."""

    def process(
        self, scores: torch.Tensor, rows: Rows, columns: SamplingColumns, history: Int32Array
    ) -> None:
        """Applies all rules but the grammar's, as `Chooser.process`."""
        process(scores, rows, columns, history)

    def choose(
        self,
        logits: torch.Tensor,
        rows: Rows,
        columns: SamplingColumns,
        sequence_indices: Int64Array,
        history: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None,
    ) -> torch.Tensor:
        """Returns one token per row, as `Chooser.choose`. Copies rows that need more than an argmax
        to float32."""
        special = rows.that_use(RANDOM | PROCESSING)
        if not special.size:
            return logits.argmax(-1)
        scores = _copy(logits, special)
        selected = rows.take(special)
        process(scores, selected, columns, history)
        if allowed is not None and len(allowed[0]):
            restrict(scores, np.searchsorted(special, allowed[0]), allowed[1])
        picked = _pick(scores, selected, sequence_indices[special])
        if special.size == len(logits):
            return picked
        return logits.argmax(-1).index_copy_(0, to_tensor(special, logits.device), picked)


def _pick(scores: torch.Tensor, rows: Rows, sequence_indices: Int64Array) -> torch.Tensor:
    """Returns the most likely token, or a drawn one for random rows: `[num_rows]`."""
    random = rows.that_use(RANDOM)
    if not random.size:
        return scores.argmax(-1)
    selected = rows.take(random)
    positions = selected.lengths - selected.numbers["num_prompt_tokens"]
    if random.size == len(scores):
        return draw_by_torch(scores, selected, sequence_indices, positions)
    index = to_tensor(random, scores.device)
    drawn = draw_by_torch(scores[index], selected, sequence_indices[random], positions)
    return scores.argmax(-1).index_copy_(0, index, drawn)


def _copy(logits: torch.Tensor, rows: Int64Array) -> torch.Tensor:
    if rows.size == len(logits):
        return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return logits[to_tensor(rows, logits.device)].float()
