"""Grammar bitmasks of a step: the tokens allowed for each sequence with a grammar."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np

from baton.engine.executor.grammar.mask_jobs import (
    Mask,
    MaskJob,
    MaskThreads,
    State,
    wait_for_any,
)
from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray
from baton.engine.scheduler.sequences.sequence import Request

SLOW_MASK_S: Final = 0.5e-3
"""CPU seconds of a sequence's last masks from which its next ones are computed beside the steps."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Tokens that grammars allow in a step.

    Attributes:
        rows: ascending, those with a grammar.
        masks: `[len(rows), num_words]`, bitmasks of their tokens; unused for late rows.
        late: rows whose mask is still being computed: they choose no token in this step.
    """

    rows: Int64Array
    masks: Mask
    late: frozenset[int]


class Startable(Protocol):
    """Compiled grammar that sequences can follow."""

    def start(self) -> State: ...


class GrammarMasks:
    """Grammar states of all batch slots. A state catches up with the tokens when a mask is due, so
    preemption, forks and rejected drafts need no notification.

    A sequence whose last mask was slow has the next one computed beside the steps, which go on
    without it: it takes part again once the mask is there.
    """

    def __init__(self, num_batch_slots: int, vocab_size: int, slow_s: float) -> None:
        """`slow_s`: CPU seconds from which a mask is slow."""
        self._num_words = -(-vocab_size // 32)
        self._slow_s = slow_s
        self._grammars: list[Startable | None] = [None] * num_batch_slots
        self._tenants = [""] * num_batch_slots
        self._states: list[State | None] = [None] * num_batch_slots
        self._jobs: list[MaskJob | None] = [None] * num_batch_slots
        self._threads = MaskThreads(num_batch_slots)
        self._num_prompt_tokens = [0] * num_batch_slots
        self._num_accepted = [0] * num_batch_slots
        self._has_grammar = np.zeros(num_batch_slots, np.bool_)

    def assign(self, batch_slot: int, request: Request) -> None:
        """Sets the grammar of a slot that a sequence of the request acquires; the grammar applies
        to the output after the prompt."""
        self._grammars[batch_slot] = cast("Startable | None", request.grammar)
        self._tenants[batch_slot] = request.spec.tenant
        self._states[batch_slot] = self._jobs[batch_slot] = None
        self._num_prompt_tokens[batch_slot] = request.spec.num_prompt_tokens
        self._has_grammar[batch_slot] = request.grammar is not None

    def applies(self, batch_slots: Int64Array) -> bool:
        """Returns whether any of these slots has a grammar."""
        return bool(self._has_grammar[batch_slots].any())

    def fill(
        self, batch_slots: Int64Array, lengths: Int64Array, token_ids: TokenArray
    ) -> Allowed | None:
        """Returns the rows with a grammar and their bitmasks; None if no row has one. Waits for a
        mask if all rows are late.

        Args:
            batch_slots, lengths: `[num_rows]`, as in `Sampler.choose`; the rows of a slot with
                drafts are adjacent.
        """
        under = np.flatnonzero(self._has_grammar[batch_slots])
        if not len(under):
            return None
        masks = np.zeros((len(under), self._num_words), np.int32)

        def is_late(run: tuple[int, slice]) -> bool:
            batch_slot, part = run
            rows = lengths[under[part]]
            return not self._fill_slot(batch_slot, rows, token_ids[batch_slot], masks[part])

        late = [run for run in _runs(batch_slots[under]) if is_late(run)]
        if late and sum(part.stop - part.start for _, part in late) == len(batch_slots):
            wait_for_any(job for slot, _ in late if (job := self._jobs[slot]) is not None)
            late = [run for run in late if is_late(run)]
        late_rows = frozenset(row for _, part in late for row in under[part].tolist())
        return Allowed(under, masks, late_rows)

    def accept(
        self,
        batch_slots: Int64Array,
        lengths: Int64Array,
        token_ids: TokenArray,
        chosen: Int64Array,
        late: frozenset[int] = frozenset(),
    ) -> dict[int, str | None]:
        """Accepts the tokens chosen after `fill`. Returns the rows at which a sequence ends: None
        if its grammar is matched completely, or the reason for which it cannot continue.

        Args:
            chosen: `[num_rows]`.
            late: rows that chose none.
        """
        endings: dict[int, str | None] = {}
        under = np.flatnonzero(self._has_grammar[batch_slots])
        if late:
            under = under[~np.isin(under, list(late))]
        for batch_slot, part in _runs(batch_slots[under]):
            rows = under[part].tolist()
            if len(rows) > 1 and lengths[rows[0]] == lengths[rows[1]]:
                states = [self._state_at(batch_slot, int(lengths[rows[0]]), token_ids[batch_slot])]
                states += [self._start(batch_slot) for _ in rows[1:]]
                for row, state in zip(rows, states, strict=True):
                    _take(state, row, int(chosen[row]), endings)
                self._num_accepted[batch_slot] += 1
            else:
                self._accept_with_drafts(
                    batch_slot, rows, lengths, token_ids[batch_slot], chosen, endings
                )
        return endings

    def _accept_with_drafts(
        self,
        batch_slot: int,
        rows: list[int],
        lengths: Int64Array,
        tokens: TokenArray,
        chosen: Int64Array,
        endings: dict[int, str | None],
    ) -> None:
        """Accepts the rows of one sequence, up to the first draft that was not chosen."""
        state = self._state_at(batch_slot, int(lengths[rows[0]]), tokens)
        for row in rows:
            token_id = int(chosen[row])
            self._num_accepted[batch_slot] += 1
            if _take(state, row, token_id, endings) or token_id != tokens[lengths[row]]:
                return

    def _fill_slot(
        self, batch_slot: int, lengths: Int64Array, tokens: TokenArray, masks: Mask
    ) -> bool:
        """Fills the masks of a slot's rows. Returns False if they are late."""
        length, drafts = int(lengths[0]), tokens[lengths[0] : lengths[-1]].tolist()
        job = self._jobs[batch_slot] or self._slow_job(batch_slot, length, tokens, drafts)
        if job is not None and not job.done.done():
            return False
        num_filled = 0 if job is None else self._take(batch_slot, job, length, drafts, masks)
        if not num_filled:
            state = self._state_at(batch_slot, length, tokens)
            num_filled = state.fill_masks(drafts, masks[: len(drafts) + 1])
        if drafts:
            # Rows after a draft that the grammar forbids are not used, so any mask will do.
            masks[num_filled:] = -1
        else:
            masks[1:] = masks[0]  # sequences that fork here
        return True

    def _slow_job(
        self, batch_slot: int, length: int, tokens: TokenArray, drafts: list[int]
    ) -> MaskJob | None:
        """Has the masks computed beside the steps if the last ones were slow; else returns None."""
        state, accepted = self._states[batch_slot], self._num_accepted[batch_slot]
        if state is None or state.mask_s < self._slow_s or accepted > length:
            return None
        masks = np.zeros((len(drafts) + 1, self._num_words), np.int32)
        job = MaskJob(state, tokens[accepted:length].tolist(), length, drafts, masks)
        self._states[batch_slot], self._jobs[batch_slot] = None, job
        self._threads.submit(job, self._tenants[batch_slot])
        return job

    def _take(
        self, batch_slot: int, job: MaskJob, length: int, drafts: list[int], masks: Mask
    ) -> int:
        """Takes the state of a job that is done, and its masks if they are those that are due.
        Returns how many it has filled. Raises the error of a job that failed."""
        num_filled = job.done.result()
        self._jobs[batch_slot] = None
        self._states[batch_slot], self._num_accepted[batch_slot] = job.state, job.length
        if (job.length, job.drafts) != (length, drafts):  # a drafter may propose others
            return 0
        masks[: len(drafts) + 1] = job.masks
        return num_filled

    def _state_at(self, batch_slot: int, length: int, tokens: TokenArray) -> State:
        """Returns the slot's state after its first `length` tokens."""
        state, accepted = self._states[batch_slot], self._num_accepted[batch_slot]
        if state is None or accepted > length:
            state, accepted = self._start(batch_slot), self._num_prompt_tokens[batch_slot]
        for token_id in tokens[accepted:length].tolist():
            state.accept(token_id)
        self._states[batch_slot], self._num_accepted[batch_slot] = state, length
        return state

    def _start(self, batch_slot: int) -> State:
        grammar = self._grammars[batch_slot]
        assert grammar is not None, "a state without a grammar"
        return grammar.start()


def _take(state: State, row: int, token_id: int, endings: dict[int, str | None]) -> bool:
    """Accepts a token. Returns whether the sequence ends with it, and records that in `endings`."""
    is_allowed = state.accept(token_id)
    if state.failure is not None or not is_allowed:
        endings[row] = state.failure or "no token of the model can continue it"
    elif state.is_finished:
        endings[row] = None
    return row in endings


def _runs(batch_slots: Int64Array) -> Iterator[tuple[int, slice]]:
    """Yields each slot with the slice of its rows, which are adjacent."""
    first = 0
    for last in range(1, len(batch_slots) + 1):
        if last == len(batch_slots) or batch_slots[last] != batch_slots[first]:
            yield int(batch_slots[first]), slice(first, last)
            first = last
