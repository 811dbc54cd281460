"""Capacity accounting of a decode worker: blocks promised to admitted requests. Allocates none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.errors import OverloadedError


def num_blocks_on_arrival(num_tokens: int, num_given: Sequence[int], block_size: int) -> int:
    """Blocks of a cache group that a request's tokens take: its sequences share them, but for a
    last block that each of them writes to, and for those of what each was given behind them.

    Args: num_given: tokens, of each sequence.
    """
    shared = -(-num_tokens // block_size)
    given = sum(-(-(num_tokens + count) // block_size) - shared for count in num_given)
    return shared + given + len(num_given) - 1


class Capacity:
    """Promises over the pool of one cache group, the one that sees furthest back.

    A promise is for the blocks a request arrives with. More may be promised than the pool has,
    since sequences end; what does not fit yet waits for its blocks. `limit` bounds that queue.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_promised = 0

    @contextmanager
    def promise(self, num_blocks: int) -> Iterator[None]:
        """Room for a request, for the length of the block. Raises `OverloadedError`."""
        if self.num_promised > 0 and self.num_promised + num_blocks > self._limit:
            raise OverloadedError(
                f"{num_blocks} more KV blocks were asked for and {self.num_promised} of "
                f"{self._limit} are promised"
            )
        self.num_promised += num_blocks
        try:
            yield
        finally:
            self.num_promised -= num_blocks
