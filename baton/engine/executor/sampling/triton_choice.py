"""Token sampling by Triton kernels, without copying logits to the host or waiting for it.

Rules and order are those of `logits_processors` and `draw`; scores are bitwise those of the CPU,
probabilities differ in rounding. Rows without processing are drawn from the logits directly; the
others from a float32 copy, in which the rules change single tokens and the grammar's mask is
applied in one pass.
"""

from typing import Any

import numpy as np
import torch

from baton.engine.executor.device_stream import uploader
from baton.engine.executor.sampling.batch_state import (
    BAD_TOKENS,
    BIAS,
    COUNTS,
    HISTORY,
    MIN_TOKENS,
    PROCESSING,
    REPETITION,
    Int64Array,
    Rows,
    SamplingColumns,
)
from baton.engine.executor.sampling.logits_processors import Bitmask, Int32Array
from baton.engine.executor.sampling.token_history import DeviceHistory
from baton.engine.executor.sampling.triton_draw import draw
from baton_kernels.sampling.bitmask import restrict
from baton_kernels.sampling.penalties import History, Penalties, penalise
from baton_kernels.sampling.token_rules import Bans, Biases, add_biases, ban


class TritonChooser:
    """`Chooser` on Triton kernels, with the token history on the device."""

    keeps_history = True

    def __init__(self, num_batch_slots: int, vocab_size: int, device: torch.device) -> None:
        self.history = DeviceHistory(num_batch_slots, device)
        self._upload = uploader(device)
        # Scratch of `penalise`, with as many rows as any step so far has needed.
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def forget(self, batch_slot: int) -> None:
        """Drops the slot's token history, as `Chooser.forget`."""
        self.history.forget(batch_slot)

    def choose(
        self,
        logits: torch.Tensor,
        rows: Rows,
        columns: SamplingColumns,
        sequence_indices: Int64Array,
        history: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None,
    ) -> torch.Tensor:
        """Returns one token per row, as `Chooser.choose`."""
        processed = rows.that_use(PROCESSING)
        if not processed.size:
            return _draw(logits, rows, sequence_indices)
        is_all, selected = processed.size == len(logits), rows.take(processed)
        index = self._upload(processed)
        if is_all:
            scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        else:
            scores = logits[index].float()
        self.process(scores, selected, columns, history)
        if allowed is not None and len(allowed[0]):
            at = self._upload(np.searchsorted(processed, allowed[0]))
            restrict(scores, at, self._mask(allowed[1]))
        chosen = _draw(scores, selected, sequence_indices[processed])
        if not is_all:
            others = np.flatnonzero((rows.uses & PROCESSING) == 0)
            at = self._upload(others)
            drawn = _draw(logits[at], rows.take(others), sequence_indices[others])
            chosen = chosen.new_empty(len(logits)).index_copy_(0, index, chosen)
            chosen.index_copy_(0, at, drawn)
        if (looking := rows.that_use(HISTORY)).size:
            of_looking = chosen if looking.size == len(logits) else chosen[self._upload(looking)]
            self.history.append(rows.batch_slots[looking], rows.lengths[looking], of_looking)
        return chosen

    def process(
        self, scores: torch.Tensor, rows: Rows, columns: SamplingColumns, history: Int32Array
    ) -> None:
        """Applies all rules but the grammar's, as `Chooser.process`."""
        uses = int(np.bitwise_or.reduce(rows.uses))
        past = self._past(rows, history) if uses & HISTORY else None
        if uses & BIAS:
            self._add_biases(scores, rows, columns)
        if past is not None and uses & (REPETITION | COUNTS):
            self._penalise(scores, rows, past)
        if uses & (BAD_TOKENS | MIN_TOKENS):
            self._ban(scores, rows, columns, past)

    def _past(self, rows: Rows, history: Int32Array) -> History:
        """Returns the token history of all rows, of length 0 for rows that do not use it."""
        looking = rows.that_use(HISTORY)
        self.history.update(rows.batch_slots[looking], rows.lengths[looking], history)
        lengths = np.where(rows.uses & HISTORY, rows.lengths, 0)
        return History(
            self.history.token_ids,
            self._upload(rows.batch_slots),
            self._upload(lengths),
            self._column(rows.numbers["num_prompt_tokens"]),
            int(lengths.max()),
        )

    def _add_biases(self, scores: torch.Tensor, rows: Rows, columns: SamplingColumns) -> None:
        at = rows.that_use(BIAS)
        owners, records = columns.biases.gather(rows.batch_slots[at])
        cells = (at[owners], records["token_id"], records["bias"])
        add_biases(scores, Biases(*map(self._column, cells)))

    def _penalise(self, scores: torch.Tensor, rows: Rows, past: History) -> None:
        """Applies the penalties; rows with neutral ones are unchanged."""
        if len(self._counts) < len(scores):
            self._counts = self._counts.new_zeros(len(scores), scores.shape[1])
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        penalise(
            scores,
            past,
            Penalties(*(self._column(rows.numbers[name]) for name in names)),
            self._counts,
        )

    def _ban(
        self, scores: torch.Tensor, rows: Rows, columns: SamplingColumns, past: History | None
    ) -> None:
        """Bans bad tokens, and end tokens of outputs below their minimum, by one list."""
        bad, ending = rows.that_use(BAD_TOKENS), rows.that_use(MIN_TOKENS)
        of_bad, sequences = columns.bad_tokens.gather(rows.batch_slots[bad])
        of_ending, ends = columns.ends.gather(rows.batch_slots[ending])
        width = int(sequences["prefix_length"].max(initial=0))
        prefixes = np.zeros((len(sequences) + len(ends), width), np.int32)
        prefixes[: len(sequences)] = sequences["prefix"][:, :width]
        lengths = np.zeros(len(prefixes), np.int64)
        lengths[: len(sequences)] = sequences["prefix_length"]
        bans = Bans(
            self._upload(np.concatenate([bad[of_bad], ending[of_ending]])),
            self._upload(np.concatenate([sequences["token_id"], ends["token_id"]])),
            self._upload(lengths),
            self._upload(prefixes),
        )
        ban(scores, bans, past)

    def _column(self, values: "np.ndarray[Any, Any]") -> torch.Tensor:
        return self._upload(values.copy())  # a field of one record may have strides of no number

    def _mask(self, bitmask: Bitmask) -> torch.Tensor:
        if isinstance(bitmask, torch.Tensor):
            return bitmask
        return self._upload(bitmask)


def _draw(logits: torch.Tensor, rows: Rows, sequence_indices: Int64Array) -> torch.Tensor:
    positions = rows.lengths - rows.numbers["num_prompt_tokens"]
    return draw(logits, rows, sequence_indices, positions)
