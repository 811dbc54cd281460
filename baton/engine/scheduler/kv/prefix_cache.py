"""Prefix cache lookup and commit for the leading blocks of a sequence. Holds and frees no block.

A prefix is cached if every cache group can continue from it: a group without a window needs all of
its blocks, a group with a window those that the next token sees.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial

import numpy as np

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.prefix import BlockHash, extend_chain, input_extras
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.pending_blocks import PendingBlocks
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.sequence import Sequence

_ENCODED = np.dtype("<i4")  # the bytes of `encode_tokens`


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached prefix of a sequence: KV of [0, num_tokens), in these blocks of each group.

    With `copies_last`, the last token of the last block must be computed, so the block is copied.
    Blocks after the first `num_committed` are pending, or copied.
    """

    num_tokens: int
    block_ids: tuple[list[int], ...]
    copies_last: bool
    num_committed: int


class PrefixCache:
    """Prefix cache over all cache groups: one map from prefixes to blocks."""

    def __init__(
        self, groups: SequenceOf[CacheGroup], block_size: int, *, is_enabled: bool = True
    ) -> None:
        self.is_enabled = is_enabled
        self._groups = groups
        self._block_size = block_size
        self._has_window = any(g.window is not None for g in groups)
        windows = [np.inf if g.window is None else g.window for g in groups]
        self._furthest = groups[int(np.argmax(windows))].pool  # of the largest window
        for group in groups:
            group.pool.reports_changes = group.pool is self._furthest

    # Lookup.

    def find(
        self,
        sequence: Sequence,
        *,
        needs_logits: bool,
        max_blocks: int | None = None,
        pending: PendingBlocks | None = None,
    ) -> PrefixHit:
        """Returns the cached prefix of a sequence. Not held yet: `admit` it immediately or drop it.

        With `needs_logits` the last token is left to be computed, and nothing but it: where all of
        a prompt is cached, its last block is copied rather than computed again. `max_blocks` limits
        the hit. `pending` blocks count as cached, but are not copied: copies precede the step that
        writes them.
        """
        if not self.is_enabled or sequence.request.spec.params.prompt_logprobs is not None:
            return self._no_hit()
        num_tokens = sequence.num_tokens
        self._extend_hashes(sequence, num_tokens)
        usable = num_tokens // self._block_size
        hashes = sequence.block_hashes[: usable if max_blocks is None else max_blocks]
        # With external KV, only the last token can be computed here.
        last_query = num_tokens - 1
        first_query = 0 if needs_logits else last_query
        length, found = self._longest_hit(
            hashes,
            lambda length: min(max(length * self._block_size, first_query), last_query),
            pending,
        )
        if not any(map(any, found)):
            return self._no_hit()
        num_hit = min(length * self._block_size, num_tokens - needs_logits)
        copies_last = num_hit < length * self._block_size
        num_committed = length - copies_last
        if pending is not None:
            num_before = pending.num_before(found)
            if copies_last and num_before < length:
                return self.find(
                    sequence, needs_logits=needs_logits, max_blocks=length - 1, pending=pending
                )
            num_committed = min(num_committed, num_before)
        return PrefixHit(num_hit, found, copies_last, num_committed)

    def find_run(self, hashes: SequenceOf[BlockHash]) -> tuple[list[int], ...]:
        """Returns the longest cached run of leading blocks that another worker can continue from,
        equally many in each group, with all that the last token sees. Not held yet."""
        length, found = self._longest_hit(
            list(hashes), lambda length: length * self._block_size - 1
        )
        return found if length else self._no_hit().block_ids

    def _no_hit(self) -> PrefixHit:
        return PrefixHit(0, tuple([] for _ in self._groups), copies_last=False, num_committed=0)

    def _longest_hit(
        self,
        hashes: list[BlockHash],
        query_after: Callable[[int], int],
        pending: PendingBlocks | None = None,
    ) -> tuple[int, tuple[list[int], ...]]:
        """Returns the most leading blocks that every group can continue from: number and tables.

        `query_after` maps a number of blocks to the next token computed after them. Each group may
        shorten the hit, so the search repeats until all agree.
        """
        full: dict[int, list[int]] = {}
        length = len(hashes)
        for i, group in enumerate(self._groups):
            if group.window is None:
                full[i] = self._lookup_chain(i, hashes[:length], pending)
                length = len(full[i])
        if length == 0:
            return 0, ()
        agreed = -1
        while self._has_window and length != agreed:
            agreed = length
            for i, group in enumerate(self._groups):
                if group.window is not None:
                    length = self._windowed_hit(i, hashes, length, query_after, pending)
        found = []
        for i, group in enumerate(self._groups):
            if group.window is None:
                found.append(full[i][:length])
            else:
                first = group.first_block(query_after(length), self._block_size)
                blocks = self._lookup_chain(i, hashes[first:length], pending)
                found.append([NULL_BLOCK] * first + blocks)
        return length, tuple(found)

    def _windowed_hit(
        self,
        index: int,
        hashes: list[BlockHash],
        length: int,
        query_after: Callable[[int], int],
        pending: PendingBlocks | None,
    ) -> int:
        """Returns the longest hit up to `length` whose blocks in the window are all cached."""
        group, i = self._groups[index], length
        while i > group.first_block(query_after(length), self._block_size):
            i -= 1
            if self._lookup(index, hashes[i], pending) is None:
                length = i
        return length

    def _lookup(
        self, index: int, block_hash: BlockHash, pending: PendingBlocks | None
    ) -> int | None:
        block_id = self._groups[index].pool.lookup(block_hash)
        if block_id is None and pending is not None:
            return pending.lookup(index, block_hash)
        return block_id

    def _lookup_chain(
        self, index: int, hashes: list[BlockHash], pending: PendingBlocks | None
    ) -> list[int]:
        """Returns a group's blocks of the leading hashes that are all cached or pending."""
        found = self._groups[index].pool.lookup_chain(hashes)
        if pending is not None:
            for block_hash in hashes[len(found) :]:
                block_id = self._lookup(index, block_hash, pending)
                if block_id is None:
                    break
                found.append(block_id)
        return found

    def add_pending(self, pending: PendingBlocks, sequence: Sequence, start: int, end: int) -> None:
        """Adds the full blocks that a step completes by computing tokens [start, end), and the one
        that a later step will complete next."""
        if self.is_enabled:
            self._extend_hashes(sequence, sequence.num_tokens)
            first, last = start // self._block_size, end // self._block_size
            pending.add(sequence.block_ids, sequence.block_hashes, range(first, last))
            pending.awaited.update(sequence.block_hashes[last : last + 1])

    def is_awaited(self, pending: PendingBlocks, sequence: Sequence, hit: PrefixHit) -> bool:
        """Returns True if the block after a sequence's hit is one that a later step computes."""
        if not pending.awaited or sequence.request.spec.params.prompt_logprobs is not None:
            return False
        next_block = hit.num_tokens // self._block_size
        return not pending.awaited.isdisjoint(sequence.block_hashes[next_block : next_block + 1])

    # Commit.

    def commit(self, sequence: Sequence) -> None:
        """Caches the full blocks of the computed tokens."""
        num_full = sequence.num_computed_tokens // self._block_size
        first = sequence.num_committed_blocks
        if not self.is_enabled or num_full <= first:
            return
        self._extend_hashes(sequence, num_full * self._block_size)
        new = sequence.block_hashes[first:num_full]
        for group, block_ids in zip(self._groups, sequence.block_ids, strict=True):
            group.pool.commit(block_ids[first:num_full], new)
        sequence.num_committed_blocks = num_full

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        """Computes chain hashes of the full blocks of the first `num_tokens`."""
        hashes, size = sequence.block_hashes, self._block_size
        known = len(hashes) * size
        if num_tokens - known >= size:
            request = sequence.request
            inputs = request.spec.encoder_inputs
            new = sequence.tokens[known:num_tokens].astype(_ENCODED, copy=False).tobytes()
            spans = [i.hashed for i in inputs]
            extras_of = partial(input_extras, spans, size) if spans else None
            extend_chain(hashes, request.root, new, size, extras_of)

    # Eviction.

    def evict(self, hashes: SequenceOf[BlockHash]) -> int:
        """Drops the blocks of these prefixes from all groups. Returns how many were cached."""
        return sum(
            group.pool.evict(b for b in map(group.pool.lookup, hashes) if b is not None)
            for group in self._groups
        )

    def clear(self) -> int:
        """Drops every cached prefix. Returns how many blocks were cached."""
        return sum(group.pool.clear() for group in self._groups)

    @property
    def has_events(self) -> bool:
        return self._furthest.has_events

    def drain_events(self) -> KvEvents:
        """Returns the cache events since the last call, of the group with the largest window."""
        return self._furthest.drain_events()
