"""Capacity accounting of a decode worker: blocks promised to admitted requests. Allocates none."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.errors import OverloadedError


def num_blocks_on_arrival(num_tokens: int, num_given: Sequence[int], block_size: int) -> int:
    """Returns the blocks that a request needs on arrival in one cache group. Its sequences share
    the blocks of the `num_tokens` prompt tokens, except for a last block that each one writes to.

    Args: num_given: for each sequence, the number of output tokens that it arrives with.
    """
    shared = -(-num_tokens // block_size)
    given = sum(-(-(num_tokens + count) // block_size) - shared for count in num_given)
    return shared + given + len(num_given) - 1


class Capacity:
    """Promised blocks in the pool of one cache group, that with the longest window.

    A promise covers the blocks that a request arrives with. Promises may exceed the pool, since
    sequences end; requests that do not fit yet wait for blocks. `limit` (blocks) bounds that queue.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_promised = 0

    @contextmanager
    def promise(self, num_blocks: int) -> Iterator[None]:
        """Promises `num_blocks` for the duration of the `with` block. Raises `OverloadedError` if
        that exceeds the limit, unless nothing else is promised."""
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
