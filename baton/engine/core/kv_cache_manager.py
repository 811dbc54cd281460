"""Which blocks a sequence has, gets and gives back. Decides nothing about order or priority.

A sequence's tokens are covered, left to right, by

    | computed | new local hit | external hit | new |

Blocks of the first two regions are findable; an external one becomes so when its sequence's KV is
committed after the handoff's fence; a new one when its last token is computed.
"""

from baton.cluster.prefix import extend_chain
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.sequence import KvSource, Sequence


class KvCacheManager:
    """Block tables of all sequences over one pool."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks that begin the sequence. Not held yet: `admit` at once or forget them.

        At least one token is left to compute, since its logits are needed; unless the KV comes from
        elsewhere, and with it the next token.
        """
        if not self.prefix_caching:
            return []
        self._extend_hashes(sequence, sequence.num_tokens)
        needs_logits = sequence.kv_source is KvSource.LOCAL
        usable = (sequence.num_tokens - int(needs_logits)) // self.block_size
        found: list[int] = []
        for block_hash in sequence.block_hashes[:usable]:
            block_id = self.pool.lookup(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_missing_blocks(self, hits: list[int], num_tokens: int) -> int:
        """Free blocks that `admit` would take for a table that covers `num_tokens`."""
        revived = sum(map(self.pool.is_free, hits))
        return self.num_blocks_for(num_tokens) - len(hits) + revived

    def admit(self, sequence: Sequence, hits: list[int], num_tokens: int) -> bool:
        """Gives a sequence without blocks its hits and new blocks to cover `num_tokens`.

        Returns False, and changes nothing, if the pool has too few free blocks.
        """
        assert not sequence.block_ids, "admit() of a sequence that has blocks"
        if self.num_missing_blocks(hits, num_tokens) > self.pool.num_free_blocks:
            return False
        self.pool.hold(hits)
        new = self.pool.allocate(max(0, self.num_blocks_for(num_tokens) - len(hits)))
        sequence.block_ids = hits + new
        sequence.num_committed_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Extends the table to cover `num_tokens`. The new blocks, or None if the pool is out."""
        missing = self.num_blocks_for(num_tokens) - len(sequence.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free_blocks:
            return None
        new = self.pool.allocate(missing)
        sequence.block_ids += new
        return new

    def commit(self, sequence: Sequence) -> None:
        """Makes the full blocks of the computed tokens findable."""
        num_full = sequence.num_computed_tokens // self.block_size
        if not self.prefix_caching or num_full <= sequence.num_committed_blocks:
            return
        self._extend_hashes(sequence, sequence.num_computed_tokens)
        for i in range(sequence.num_committed_blocks, num_full):
            self.pool.commit(sequence.block_ids[i], sequence.block_hashes[i])
        sequence.num_committed_blocks = num_full

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks back, the tail to be evicted first."""
        self.pool.release(reversed(sequence.block_ids))
        sequence.block_ids = []
        sequence.num_committed_blocks = 0
        sequence.num_computed_tokens = 0

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        if len(sequence.block_hashes) < num_tokens // self.block_size:
            known = sequence.token_ids[:num_tokens]
            extend_chain(sequence.block_hashes, sequence.root, known, self.block_size)
