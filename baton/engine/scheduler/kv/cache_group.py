"""The layers that share a mask rule, and so the blocks of one pool."""

from dataclasses import dataclass

from baton.engine.scheduler.kv.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The blocks of the layers that share a mask rule.

    Attributes:
        window: a query sees this many tokens, its own among them; None: all.
        host: blocks in host memory to swap to.
    """

    pool: BlockPool
    window: int | None = None
    host: BlockPool | None = None

    def first_block(self, query: int, block_size: int) -> int:
        """The first block that the token at position `query` can see."""
        return 0 if self.window is None else max(0, query - self.window + 1) // block_size
