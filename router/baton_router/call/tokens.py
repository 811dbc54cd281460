"""Consecutive tokens of one sequence, in columns: no object for each."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Most likely tokens at one position, in descending order, with log-probabilities in nats."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens. One is made for each message, so it is not frozen, which is three times
    as fast.

    Attributes:
        position: position of the first one in the output.
        logprobs: log-probability of each in nats; empty unless asked for.
        tops: most likely tokens at the position of each; empty unless asked for.
    """

    position: int
    token_ids: list[int]
    logprobs: Sequence[float] = ()
    tops: Sequence[TopLogprobs] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, begin: int, end: int) -> "Tokens":
        """Returns the tokens of the range [begin, end), counted from the first one."""
        return Tokens(
            self.position + begin,
            self.token_ids[begin:end],
            self.logprobs[begin:end],
            self.tops[begin:end],
        )

    def extend(self, more: "Tokens") -> None:
        """Adds the tokens that follow."""
        self.token_ids += more.token_ids
        if more.logprobs:
            self.logprobs = [*self.logprobs, *more.logprobs]
        if more.tops:
            self.tops = [*self.tops, *more.tops]
