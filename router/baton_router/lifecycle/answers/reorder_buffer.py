"""Reorder buffer for the tokens of one sequence, from whichever worker they come.

The first token may come from the prefill worker, the rest from the decode worker, and neither waits
for the other; positions decide. A repeated token, from the same workers or from those that took
over, is dropped if it is the same.
"""

from baton.errors import UnavailableError
from baton_router.call.tokens import Tokens


class ReorderBuffer:
    """Reorder buffer of one sequence: output without gaps or repetitions.

    Attributes:
        token_ids: tokens that were released in order.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._early: dict[int, Tokens] = {}  # single ones, by position

    @property
    def has_gap(self) -> bool:
        """True if tokens wait for an earlier one."""
        return bool(self._early)

    def accept(self, tokens: Tokens) -> Tokens:
        """Returns the tokens that can be released now.

        Raises `UnavailableError` for a token that differs from the one released for its position:
        its successors do not continue the released output.
        """
        num_released = len(self.token_ids)
        if tokens.position == num_released and not self._early:
            self.token_ids += tokens.token_ids  # fast path: the next tokens
            return tokens
        for index, token_id in enumerate(tokens.token_ids):
            position = tokens.position + index
            if position < num_released:
                self._check_repeated(position, token_id)
            else:
                self._early.setdefault(position, tokens.part(index, index + 1))
        ready = Tokens(num_released, [])
        while (following := self._early.pop(num_released + len(ready), None)) is not None:
            ready.extend(following)
        self.token_ids += ready.token_ids
        return ready

    def forget_early(self) -> None:
        """Drops tokens that wait for earlier ones which will not come."""
        self._early.clear()

    def _check_repeated(self, position: int, token_id: int) -> None:
        released = self.token_ids[position]
        if token_id != released:
            raise UnavailableError(
                f"computed again, position {position} of the output is token {token_id}, after "
                f"{released} was sent; it cannot be continued"
            )
