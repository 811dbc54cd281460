"""Puts the tokens of one sequence in order, from whichever worker they come.

The first token may come from the prefill worker, the rest from the decode worker, and neither waits
for the other; positions decide. A position that was given out already is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at one position, the most likely first, with theirs in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One token at its position in the output. `logprob` and `top` are None unless asked for."""

    position: int
    token_id: int
    logprob: float | None
    top: TopLogprobs | None = None


class Assembly:
    """The output of one sequence, without gaps or repetitions."""

    def __init__(self, next_position: int = 0) -> None:
        self.next_position = next_position
        self._early: dict[int, Token] = {}

    @property
    def has_gap(self) -> bool:
        """Whether tokens wait for one before them."""
        return bool(self._early)

    def accept(self, tokens: Sequence[Token]) -> list[Token]:
        """The tokens that can be given out now, in order."""
        for token in tokens:
            if token.position >= self.next_position:
                self._early.setdefault(token.position, token)
        ready = []
        while self.next_position in self._early:
            ready.append(self._early.pop(self.next_position))
            self.next_position += 1
        return ready
