"""Which tokens the grammars of a step's sequences allow. Knows states, not grammars."""

from collections.abc import Iterator
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from baton.engine.scheduler.sequences.batch_slots import Int64Array, TokenArray
from baton.engine.scheduler.sequences.sequence import Request

Mask = npt.NDArray[np.int32]


class State(Protocol):
    """Where in its grammar a sequence is."""

    @property
    def failure(self) -> str | None: ...

    @property
    def is_finished(self) -> bool: ...

    def accept(self, token_id: int) -> bool: ...

    def fill_masks(self, drafts: list[int], rows: Mask) -> int: ...


class Startable(Protocol):
    """A grammar that is ready to be followed."""

    def start(self) -> State: ...


class GrammarMasks:
    """The states of all seats. A state is brought up to date from the tokens when a mask is due, so
    preemption, forks and rejected drafts need no word from anybody."""

    def __init__(self, num_seats: int, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._grammars: list[Startable | None] = [None] * num_seats
        self._states: list[State | None] = [None] * num_seats
        self._num_prompt_tokens = [0] * num_seats
        self._num_accepted = [0] * num_seats
        self._has_grammar = np.zeros(num_seats, np.bool_)

    def assign(self, seat: int, request: Request) -> None:
        """A sequence of the request takes the seat; its output begins behind the prompt."""
        self._grammars[seat] = cast("Startable | None", request.grammar)
        self._states[seat] = None
        self._num_prompt_tokens[seat] = request.num_prompt_tokens
        self._has_grammar[seat] = request.grammar is not None

    def applies(self, seats: Int64Array) -> bool:
        """Whether any of these seats is under a grammar."""
        return bool(self._has_grammar[seats].any())

    def fill(
        self, seats: Int64Array, lengths: Int64Array, token_ids: TokenArray
    ) -> tuple[Int64Array, Mask] | None:
        """The rows under a grammar and what each is allowed; None: no row is.

        Args:
            seats, lengths: `[num_rows]`, as the sampler is given them; the rows of a seat that has
                drafts follow each other.
        """
        under = np.flatnonzero(self._has_grammar[seats])
        if not len(under):
            return None
        masks = np.zeros((len(under), self._num_words), np.int32)
        for seat, part in _runs(seats[under]):
            self._fill_seat(seat, lengths[under[part]], token_ids[seat], masks[part])
        return under, masks

    def accept(
        self, seats: Int64Array, lengths: Int64Array, token_ids: TokenArray, chosen: Int64Array
    ) -> dict[int, str | None]:
        """Takes the tokens chosen after `fill`. The rows with which a sequence ends, and why it
        failed if it did: its grammar is matched to its end, or cannot go on.

        Args:
            chosen: `[num_rows]`.
        """
        endings: dict[int, str | None] = {}
        under = np.flatnonzero(self._has_grammar[seats])
        for seat, part in _runs(seats[under]):
            rows = under[part].tolist()
            if len(rows) > 1 and lengths[rows[0]] == lengths[rows[1]]:
                states = [self._state_at(seat, int(lengths[rows[0]]), token_ids[seat])]
                states += [self._start(seat) for _ in rows[1:]]
                for row, state in zip(rows, states, strict=True):
                    _take(state, row, int(chosen[row]), endings)
                self._num_accepted[seat] += 1
            else:
                self._accept_with_drafts(seat, rows, lengths, token_ids[seat], chosen, endings)
        return endings

    def _accept_with_drafts(
        self,
        seat: int,
        rows: list[int],
        lengths: Int64Array,
        tokens: TokenArray,
        chosen: Int64Array,
        endings: dict[int, str | None],
    ) -> None:
        """One sequence's rows: those after a draft that was not chosen are void."""
        state = self._state_at(seat, int(lengths[rows[0]]), tokens)
        for row in rows:
            token_id = int(chosen[row])
            self._num_accepted[seat] += 1
            if _take(state, row, token_id, endings) or token_id != tokens[lengths[row]]:
                return

    def _fill_seat(self, seat: int, lengths: Int64Array, tokens: TokenArray, masks: Mask) -> None:
        state = self._state_at(seat, int(lengths[0]), tokens)
        drafts = tokens[lengths[0] : lengths[-1]].tolist()
        num_filled = state.fill_masks(drafts, masks[: len(drafts) + 1])
        if drafts:
            # Behind a draft that the grammar forbids nothing is used, so anything will do.
            masks[num_filled:] = -1
        else:
            masks[1:] = masks[0]  # sequences that fork here

    def _state_at(self, seat: int, length: int, tokens: TokenArray) -> State:
        """The seat's state behind its first `length` tokens."""
        state, accepted = self._states[seat], self._num_accepted[seat]
        if state is None or accepted > length:
            state, accepted = self._start(seat), self._num_prompt_tokens[seat]
        for token_id in tokens[accepted:length].tolist():
            state.accept(token_id)
        self._states[seat], self._num_accepted[seat] = state, length
        return state

    def _start(self, seat: int) -> State:
        grammar = self._grammars[seat]
        assert grammar is not None, "a state without a grammar"
        return grammar.start()


def _take(state: State, row: int, token_id: int, endings: dict[int, str | None]) -> bool:
    """Whether the sequence ends with this token."""
    is_allowed = state.accept(token_id)
    if state.failure is not None or not is_allowed:
        endings[row] = state.failure or "no token of the model can continue it"
    elif state.is_finished:
        endings[row] = None
    return row in endings


def _runs(seats: Int64Array) -> Iterator[tuple[int, slice]]:
    """Each seat, and where its rows are; they follow each other."""
    first = 0
    for last in range(1, len(seats) + 1):
        if last == len(seats) or seats[last] != seats[first]:
            yield int(seats[first]), slice(first, last)
            first = last
