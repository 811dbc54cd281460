"""Puts the tokens of one sequence in order, from whichever worker they come.

The first token may come from the prefill worker, the rest from the decode worker, and neither waits
for the other; positions decide. What comes again, from the same workers or from those that took
over, is dropped, if it is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens at one position, the most likely first, with theirs in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Token(NamedTuple):
    """One token at its position in the output. `logprob` and `top` are None unless asked for."""

    position: int
    token_id: int
    logprob: float | None = None
    top: TopLogprobs | None = None


class ReorderBuffer:
    """The output of one sequence, without gaps or repetitions.

    Attributes:
        token_ids: what was given out.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._early: dict[int, Token] = {}

    @property
    def has_gap(self) -> bool:
        """Whether tokens wait for one before them."""
        return bool(self._early)

    def accept(self, tokens: Sequence[Token]) -> list[Token]:
        """The tokens that can be given out now, in order.

        Raises `UnavailableError` for a token that is another than was given out for its position:
        what follows it does not follow what was given out.
        """
        if len(tokens) == 1 and not self._early and tokens[0].position == len(self.token_ids):
            self.token_ids.append(tokens[0].token_id)  # as nearly always: one token, the next
            return [tokens[0]]
        for token in tokens:
            if token.position < len(self.token_ids):
                self._check_repeated(token)
            else:
                self._early.setdefault(token.position, token)
        ready = []
        while len(self.token_ids) in self._early:
            token = self._early.pop(len(self.token_ids))
            ready.append(token)
            self.token_ids.append(token.token_id)
        return ready

    def forget_early(self) -> None:
        """Drops what waits for tokens that will not come."""
        self._early.clear()

    def _check_repeated(self, token: Token) -> None:
        given_out = self.token_ids[token.position]
        if token.token_id != given_out:
            raise UnavailableError(
                f"computed again, position {token.position} of the output is token "
                f"{token.token_id}, after {given_out} was sent; it cannot be continued"
            )
