"""Reorder buffer for the tokens of one sequence, from whichever worker they come.

The first token may come from the prefill worker, the rest from the decode worker, and neither waits
for the other; positions decide. A repeated token, from the same workers or from those that took
over, is dropped if it is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Most likely tokens at one position, in descending order, with log-probabilities in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Token(NamedTuple):
    """Token at its position in the output. `logprob` and `top` are None unless asked for."""

    position: int
    token_id: int
    logprob: float | None = None
    top: TopLogprobs | None = None


class ReorderBuffer:
    """Reorder buffer of one sequence: output without gaps or repetitions.

    Attributes:
        token_ids: tokens that were released in order.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._early: dict[int, Token] = {}

    @property
    def has_gap(self) -> bool:
        """True if tokens wait for an earlier one."""
        return bool(self._early)

    def accept(self, tokens: Sequence[Token]) -> list[Token]:
        """Returns the tokens that can be released now, in order.

        Raises `UnavailableError` for a token that differs from the one released for its position:
        its successors do not continue the released output.
        """
        if len(tokens) == 1 and not self._early and tokens[0].position == len(self.token_ids):
            self.token_ids.append(tokens[0].token_id)  # fast path: the next token alone
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
        """Drops tokens that wait for earlier ones which will not come."""
        self._early.clear()

    def _check_repeated(self, token: Token) -> None:
        given_out = self.token_ids[token.position]
        if token.token_id != given_out:
            raise UnavailableError(
                f"computed again, position {token.position} of the output is token "
                f"{token.token_id}, after {given_out} was sent; it cannot be continued"
            )
