"""Chooses the next token of each sequence from its logits, batched over the step.

The order is that of transformers' processors: those of `logits_processors`, the grammar, then
temperature, top-k, top-p, min-p and the draw. Random choices are drawn by inverse transform in the
order of the vocabulary from the number of (seed, sequence index, output position), so that a row
gets the same token in any batch. Two rules differ from transformers', so that `top_k=1` is greedy
and a row does not depend on its neighbours: `top_k` keeps exactly k tokens, and tokens equally
likely are ordered by id.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.draw import Draw, draw_by_torch, largest, to_tensor
from baton.engine.logits_processors import Bitmask, Int32Array, process, restrict
from baton.engine.sampling_columns import (
    GRAMMAR,
    HISTORY,
    LOGPROBS,
    PROCESSING,
    RANDOM,
    Int64Array,
    Rows,
    SamplingColumns,
)
from baton.sampling import SamplingParams

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What `Sampler.sample` chose.

    Attributes:
        token_ids: `[num_rows]`.
        logprobs: `[num_rows]`, of the chosen token in nats, from the untouched logits; None if no
            row asks, 0 for a row that does not.
        top_ids, top_logprobs: `[num_rows, k]`, most likely first, k the most that a row asks for or
            the whole vocabulary; None if no row asks. A row that asks for fewer has them first;
            a row that asks for none has nothing of meaning.
    """

    token_ids: Int64Array
    logprobs: Float32Array | None = None
    top_ids: Int64Array | None = None
    top_logprobs: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, on the device, where nothing has waited for it yet.

    Attributes:
        token_ids: `[num_rows]`.
    """

    token_ids: torch.Tensor
    _scored_rows: Int64Array | None = None
    _scores: "DeviceScores | None" = None

    def fetch(self) -> Sampled:
        """Waits for the device."""
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
    """`Scores` on the device."""

    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def fetch(self) -> Scores:
        """Waits for the device."""
        columns = (self.logprobs, self.top_ids, self.top_logprobs)
        return Scores(*(column.cpu().numpy() for column in columns))


class Sampler:
    """The sampler of one model: knows what each seat asks for, and keeps nothing between steps.

    `ignore_eos` is not looked at: who ignores an end of sequence may still be given one.
    """

    def __init__(
        self,
        num_seats: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: frozenset[int],
        *,
        draw_from_logits: Draw | None = None,
    ) -> None:
        """Args: draw_from_logits: what draws instead of torch; it leaves logits as they are, reads
        any type of them and takes the most likely token where the temperature is 0.
        """
        self._draw = draw_from_logits or draw_by_torch
        self._draws_from_logits = draw_from_logits is not None
        self._columns = SamplingColumns(num_seats, vocab_size, eos_token_ids)
        self._device = device

    def assign(self, seat: int, params: SamplingParams, num_prompt_tokens: int) -> None:
        """A sequence takes the seat; what was there before is forgotten."""
        self._columns.assign(seat, params, num_prompt_tokens)

    def reads_history(self, seats: Int64Array) -> bool:
        """Whether the choice for any of these seats depends on the tokens before it."""
        return bool(np.any(self._columns.uses[seats] & HISTORY))

    def sample(
        self,
        logits: torch.Tensor,
        seats: Int64Array,
        sequence_indices: Int64Array,
        lengths: Int64Array,
        token_ids: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None = None,
    ) -> Sampled:
        """`choose`, waited for."""
        return self.choose(logits, seats, sequence_indices, lengths, token_ids, allowed).fetch()

    def choose(
        self,
        logits: torch.Tensor,
        seats: Int64Array,
        sequence_indices: Int64Array,
        lengths: Int64Array,
        token_ids: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None = None,
    ) -> Choice:
        """One token per row. A row with nothing left to choose from still gets some token.

        Args:
            logits: `[num_rows, vocab_size]` of any float type; not changed.
            seats: `[num_rows]`; a seat may have several rows.
            sequence_indices: `[num_rows]`, which of its request's sequences each row belongs to.
            lengths: `[num_rows]`, tokens before the one to be chosen, prompt included.
            token_ids: `[num_seats, capacity]`; `[seats[r], :lengths[r]]` is the history of row r.
            allowed: the rows under a grammar, and what it allows each.
        """
        uses = self._columns.uses.take(seats)
        if allowed is not None:
            uses[allowed[0]] |= GRAMMAR
        if not np.count_nonzero(uses):
            return Choice(logits.argmax(-1))
        rows = self._columns.rows(seats, lengths, uses)
        chosen = self._choose(logits, rows, sequence_indices, token_ids, allowed)
        return _with_logprobs(logits, rows, chosen)

    def beam_candidates(
        self,
        logits: torch.Tensor,
        seats: Int64Array,
        lengths: Int64Array,
        token_ids: Int32Array,
        k: int,
    ) -> tuple[Int64Array, Float32Array]:
        """The `k` best next tokens of each row and their scores, best first: `[num_rows, k]`.

        A score is the token's log-probability after the processors, as in transformers' beam
        search; it is -inf where fewer than `k` tokens are left. `k` is at most the vocabulary.
        """
        scores = logits.log_softmax(-1, dtype=torch.float32)
        rows = self._columns.rows(seats, lengths, self._columns.uses.take(seats))
        process(scores, rows, self._columns, token_ids)
        ids = largest(scores, min(k, scores.shape[-1]))
        return ids.cpu().numpy(), scores.gather(-1, ids).cpu().numpy()

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Rows,
        sequence_indices: Int64Array,
        history: Int32Array,
        allowed: tuple[Int64Array, Bitmask] | None,
    ) -> torch.Tensor:
        """`[num_rows]`. The rows that are more than an argmax are worked on in a float32 copy."""
        if self._draws_from_logits and not rows.that_use(PROCESSING).size:
            positions = rows.lengths - rows.numbers["num_prompt_tokens"]
            return self._draw(logits, rows, sequence_indices, positions)
        special = rows.that_use(RANDOM | PROCESSING)
        if not special.size:
            return logits.argmax(-1)
        scores = self._copy(logits, special)
        asking = rows.take(special)
        process(scores, asking, self._columns, history)
        if allowed is not None and len(allowed[0]):
            restrict(scores, np.searchsorted(special, allowed[0]), allowed[1])
        picked = self._pick(scores, asking, sequence_indices[special])
        if special.size == len(logits):
            return picked
        return logits.argmax(-1).index_copy_(0, to_tensor(special, self._device), picked)

    def _pick(self, scores: torch.Tensor, rows: Rows, sequence_indices: Int64Array) -> torch.Tensor:
        """The most likely token, or a drawn one where the row asks: `[num_rows]`."""
        random = rows.that_use(RANDOM)
        if not random.size:
            return scores.argmax(-1)
        asking = rows.take(random)
        positions = asking.lengths - asking.numbers["num_prompt_tokens"]
        if random.size == len(scores):
            return self._draw(scores, asking, sequence_indices, positions)
        index = to_tensor(random, self._device)
        drawn = self._draw(scores[index], asking, sequence_indices[random], positions)
        return scores.argmax(-1).index_copy_(0, index, drawn)

    def _copy(self, logits: torch.Tensor, rows: Int64Array) -> torch.Tensor:
        if rows.size == len(logits):
            return logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return logits[to_tensor(rows, self._device)].float()


def score(logits: torch.Tensor, targets: Int64Array, k: int) -> Scores:
    """How likely `targets` and the `k` most likely tokens are, in nats.

    Args:
        logits: `[num_rows, vocab_size]` of any float type; not changed.
        targets: `[num_rows]` token ids.
        k: 0 or more; more than the vocabulary is the vocabulary.
    """
    return _score(logits, to_tensor(targets, logits.device), k).fetch()


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
    if at.size < len(rows.seats):
        index = to_tensor(at, logits.device)
        logits, targets = logits[index], chosen[index]
    return Choice(chosen, at, _score(logits, targets, k))


def _spread(chosen: Int64Array, at: Int64Array, scores: Scores) -> Sampled:
    """The scores of the rows `at` among those of all rows."""
    num_rows, k = len(chosen), scores.top_ids.shape[1]
    logprobs = np.zeros(num_rows, np.float32)
    logprobs[at] = scores.logprobs
    if k == 0:
        return Sampled(chosen, logprobs)
    top_ids = np.zeros((num_rows, k), np.int64)
    top_logprobs = np.full((num_rows, k), -np.inf, np.float32)
    top_ids[at], top_logprobs[at] = scores.top_ids, scores.top_logprobs
    return Sampled(chosen, logprobs, top_ids, top_logprobs)
