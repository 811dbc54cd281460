"""Sampler: chooses the next token of each sequence from its logits, batched over the step.

The order is that of transformers: `logits_processors`, the grammar, then temperature, top-k, top-p,
min-p and the draw. A draw is an inverse transform in the order of the vocabulary, by the random
number of (seed, sequence index, output position), so that a row gets the same token in any batch.
Two rules differ from transformers, so that `top_k=1` is greedy and rows are independent: `top_k`
keeps exactly k tokens, and ties are ordered by token id.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.executor.device_stream import uploader
from baton.engine.executor.sampling.batch_state import (
    GRAMMAR,
    HISTORY,
    LOGPROBS,
    Int64Array,
    Rows,
    SamplingColumns,
)
from baton.engine.executor.sampling.draw import largest, to_tensor
from baton.engine.executor.sampling.logits_processors import Bitmask, Int32Array
from baton.engine.executor.sampling.torch_choice import TorchChooser
from baton.sampling import SamplingParams

Float32Array = npt.NDArray[np.float32]
# Rows whose scores are computed at once: 20 bytes per row and token of the vocabulary.
_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Sampled:
    """Chosen tokens on the host: what `Choice.fetch` returns.

    Attributes:
        token_ids: `[num_rows]`.
        logprobs: `[num_rows]`, of the chosen token in nats, from the unprocessed logits; None if no
            row requests them, 0 for a row that does not.
        top_ids, top_logprobs: `[num_rows, k]`, most likely first; k is the most that a row
            requests, at most the vocabulary; None if no row requests any. A row that requests fewer
            has them first; for a row that requests none the values are undefined.
    """

    token_ids: Int64Array
    logprobs: Float32Array | None = None
    top_ids: Int64Array | None = None
    top_logprobs: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen tokens on the device, before synchronization with the host.

    Attributes:
        token_ids: `[num_rows]`.
    """

    token_ids: torch.Tensor
    _scored_rows: Int64Array | None = None
    _scores: "DeviceScores | None" = None

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "Choice":
        """Returns the choice with copies of its tensors."""
        scores = self._scores and self._scores.copied(copy)
        return Choice(copy(self.token_ids), self._scored_rows, scores)

    def fetch(self) -> Sampled:
        """Returns the result on the host; waits for the device if the tensors are there."""
        token_ids = self.token_ids.cpu().numpy()
        if self._scored_rows is None or self._scores is None:
            return Sampled(token_ids)
        return _spread(token_ids, self._scored_rows, self._scores.fetch())


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of given tokens `[num_rows]`, and `[num_rows, k]` of the most likely."""

    logprobs: Float32Array
    top_ids: Int64Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class DeviceScores:
    """`Scores` on the device, or as they are copied from it."""

    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def copied(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> "DeviceScores":
        """Returns the scores with copies of their tensors."""
        return DeviceScores(copy(self.logprobs), copy(self.top_ids), copy(self.top_logprobs))

    def fetch(self) -> Scores:
        """Returns the scores on the host; waits for the device if the tensors are there."""
        columns = (self.logprobs, self.top_ids, self.top_logprobs)
        return Scores(*(column.cpu().numpy() for column in columns))


class Chooser(Protocol):
    """Backend of the sampler for one kind of device: processes scores and chooses tokens.

    Attributes:
        keeps_history: whether it keeps the tokens that it has chosen, so that the next step does
            not need them on the host.
    """

    keeps_history: bool

    def forget(self, batch_slot: int) -> None:
        """Drops the slot's state: it has another sequence, or its tokens have changed."""
        ...

    def process(
        self, scores: torch.Tensor, rows: Rows, columns: SamplingColumns, history: Int32Array
    ) -> None:
        """Applies all rules but the grammar's, in place, as `logits_processors.process`."""
        ...

    def choose(
        self,
        logits: torch.Tensor,
        rows: Rows,
        columns: SamplingColumns,
        sequence_indices: Int64Array,
        history: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None,
    ) -> torch.Tensor:
        """Returns one token per row, `[num_rows]`, as `Sampler.choose`."""
        ...


class Sampler:
    """Sampler of one model, with the parameters of each slot. Its chooser keeps chosen tokens.

    It does not read `ignore_eos`: a sequence that ignores end-of-sequence tokens may still get one.
    """

    def __init__(
        self,
        num_batch_slots: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
        chooser: Chooser | None = None,
    ) -> None:
        """`chooser`: a `TorchChooser` if None."""
        self._chooser = chooser or TorchChooser()
        self._columns = SamplingColumns(num_batch_slots, vocab_size, eos_token_ids)
        self._device = device

    def assign(self, batch_slot: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Sets the parameters of a slot that a sequence acquires, and drops its former state."""
        self._columns.assign(batch_slot, params, num_prompt_tokens)
        self._chooser.forget(batch_slot)

    def needs_history(self, batch_slots: Int64Array) -> bool:
        """Returns whether sampling for any of these slots reads all previous tokens on the host."""
        if self._chooser.keeps_history:
            return False
        return bool((self._columns.uses[batch_slots] & HISTORY).any())

    def choose(
        self,
        logits: torch.Tensor,
        batch_slots: Int64Array,
        sequence_indices: Int64Array,
        lengths: Int64Array,
        token_ids: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None = None,
    ) -> Choice:
        """Chooses one token per row. A row whose tokens are all banned still gets some token.

        Args:
            logits: `[num_rows, vocab_size]` of any float type; not changed.
            batch_slots: `[num_rows]`; a slot may have several rows.
            sequence_indices: `[num_rows]`, index of the row's sequence within its request.
            lengths: `[num_rows]`, tokens before the one to choose, prompt included.
            token_ids: `[num_batch_slots, capacity]`; `[batch_slots[r], :lengths[r]]` is the history
                of row r.
            allowed: the rows with a grammar, and the bitmask of tokens that it allows for each.
        """
        uses = self._columns.uses.take(batch_slots)
        if allowed is not None:
            uses[allowed[0]] |= GRAMMAR
        if not np.count_nonzero(uses):
            return Choice(logits.argmax(-1))
        rows = self._columns.rows(batch_slots, lengths, uses)
        chosen = self._chooser.choose(
            logits, rows, self._columns, sequence_indices, token_ids, allowed
        )
        return _with_logprobs(logits, rows, chosen)

    def beam_candidates(
        self,
        logits: torch.Tensor,
        batch_slots: Int64Array,
        lengths: Int64Array,
        token_ids: Int32Array,
        k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `k` best next tokens of each row and their scores, best first, on the device:
        `[num_rows, k]`. A score is the token's log-probability after the processors, as in
        transformers' beam search; -inf if fewer than `k` tokens are left. `k` is capped at the
        vocabulary size."""
        scores = logits.log_softmax(-1, dtype=torch.float32)
        rows = self._columns.rows(batch_slots, lengths, self._columns.uses.take(batch_slots))
        self._chooser.process(scores, rows, self._columns, token_ids)
        for batch_slot in set(batch_slots.tolist()):  # beams move between slots, with their tokens
            self._chooser.forget(batch_slot)
        ids = largest(scores, min(k, scores.shape[-1]))
        return ids, scores.gather(-1, ids)


def score(logits: torch.Tensor, targets: Int64Array, k: int) -> DeviceScores:
    """Returns the log-probabilities of `targets` and of the `k` most likely tokens, in nats.

    Args:
        logits: `[num_rows, vocab_size]` of any float type; not changed.
        targets: `[num_rows]` token ids.
        k: 0 or more; capped at the vocabulary size.
    """
    on_device = to_tensor(targets, logits.device)
    slices = zip(logits.split(_SCORED_ROWS), on_device.split(_SCORED_ROWS), strict=True)
    scores = [_score(*part, k) for part in slices]
    if len(scores) == 1:
        return scores[0]
    columns = zip(*((s.logprobs, s.top_ids, s.top_logprobs) for s in scores), strict=True)
    return DeviceScores(*map(torch.cat, columns))


def _score(logits: torch.Tensor, targets: torch.Tensor, k: int) -> DeviceScores:
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    of_targets = logprobs.gather(-1, targets[:, None])[:, 0]
    top_ids = largest(logprobs, min(k, logprobs.shape[-1]))
    return DeviceScores(of_targets, top_ids, logprobs.gather(-1, top_ids))


def _with_logprobs(logits: torch.Tensor, rows: Rows, chosen: torch.Tensor) -> Choice:
    at = rows.that_use(LOGPROBS)
    if not at.size:
        return Choice(chosen)
    k = int(rows.numbers["num_top_logprobs"][at].max())
    targets = chosen
    if at.size < len(rows.batch_slots):
        index = uploader(logits.device)(at)
        logits, targets = logits[index], chosen[index]
    return Choice(chosen, at, _score(logits, targets, k))


def _spread(chosen: Int64Array, at: Int64Array, scores: Scores) -> Sampled:
    """Expands the scores of the rows `at` to all rows."""
    num_rows, k = len(chosen), scores.top_ids.shape[1]
    logprobs = np.zeros(num_rows, np.float32)
    logprobs[at] = scores.logprobs
    if k == 0:
        return Sampled(chosen, logprobs)
    top_ids = np.zeros((num_rows, k), np.int64)
    top_logprobs = np.full((num_rows, k), -np.inf, np.float32)
    top_ids[at], top_logprobs[at] = scores.top_ids, scores.top_logprobs
    return Sampled(chosen, logprobs, top_ids, top_logprobs)
