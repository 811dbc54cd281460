"""KV cache group: the layers that share a mask rule, and so the blocks of one pool."""

from dataclasses import dataclass

from baton.engine.scheduler.kv.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Block pools of the layers that share a mask rule.

    Attributes:
        window: sliding window: tokens that a query sees, its own included; None: all.
        host: blocks in host memory to swap to.
        num_layers: number of layers in the group.
    """

    pool: BlockPool
    window: int | None = None
    host: BlockPool | None = None
    num_layers: int = 1

    def first_block(self, query: int, block_size: int) -> int:
        """Returns the first block that the token at position `query` can see."""
        return 0 if self.window is None else max(0, query - self.window + 1) // block_size
