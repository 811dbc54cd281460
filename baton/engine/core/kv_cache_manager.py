"""Which blocks a sequence has, gets and gives back. Decides nothing about order or priority.

A sequence's tokens are covered, left to right, by

    | computed | new local hit | external hit | new | lookahead |

Blocks of the first two regions are findable; an external one becomes so when its sequence's KV is
committed after the handoff's fence; a new one when its last token is computed. Lookahead is room
for drafts: they count as computed only once verified, so they are never committed before.

Layers that see the same tokens form a cache group with a pool of its own. A group with a window
holds only the blocks that its next query can see; the rest of its table is `NULL_BLOCK`.
"""

import struct
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from baton.cluster.prefix import BlockHash, extend_chain
from baton.engine.core.block_pool import NULL_BLOCK, BlockPool, CacheEvents
from baton.engine.core.encoder_cache import EncoderInput
from baton.engine.core.plan import BlockMove
from baton.engine.core.seats import Int64Array, Seats
from baton.engine.core.sequence import Sequence


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


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What of a sequence is cached: KV of [0, num_tokens), in these blocks of each group.

    With `copies_last`, one token of the last block is yet to be computed, so it will be copied.
    """

    num_tokens: int
    block_ids: tuple[list[int], ...]
    copies_last: bool


@dataclass(slots=True)
class MemoryOperations:
    """What is to be done to the pools before a step computes, in the order of the fields."""

    swap_out: list[BlockMove] = field(default_factory=list)
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    cleared: dict[tuple[int, int], None] = field(default_factory=dict)
    swap_in: list[BlockMove] = field(default_factory=list)

    def copy(self, group: int, source: int, target: int) -> None:
        self.cleared.pop((group, target), None)
        self.copies[group, target] = source


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """How the blocks of all groups are used.

    Attributes:
        num_logical_blocks: entries of all block tables.
        num_physical_blocks: blocks held; less, when sequences share.
        num_saved_blocks: the difference.
        num_wasted_slots: token slots of the tables' last blocks that hold no token yet.
    """

    num_logical_blocks: int
    num_physical_blocks: int
    num_saved_blocks: int
    num_wasted_slots: int


class KvCacheManager:
    """Block tables of all sequences, one per cache group."""

    def __init__(
        self,
        groups: SequenceOf[CacheGroup],
        seats: Seats,
        block_size: int,
        *,
        max_chunk: int,
        prefix_caching: bool = True,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.operations = MemoryOperations()
        self._seats = seats
        self._max_chunk = max_chunk
        self._num_reserved = [0] * len(self.groups)
        self._has_window = any(g.window is not None for g in self.groups)
        self._host_releases: list[tuple[int, list[int]]] = []

    # Questions.

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def peak_blocks(self, group: CacheGroup, num_tokens: int) -> int:
        """The most blocks a sequence holds at once while it is computed up to `num_tokens`."""
        total = self.num_blocks_for(num_tokens)
        if group.window is None:
            return total
        return min(total, self.num_blocks_for(group.window - 1 + self._max_chunk) + 1)

    def num_free_blocks(self, group: int) -> int:
        """Free blocks that are not reserved."""
        return self.groups[group].pool.num_free_blocks - self._num_reserved[group]

    def common_prefix_blocks(self, seats: Int64Array, group: int = 0) -> int:
        """Leading blocks that the sequences on these seats all share."""
        if len(seats) < 2:
            return 0
        tables = self._seats.block_tables[group][seats]
        alike = (tables == tables[0]).all(0) & (tables[0] != NULL_BLOCK)
        return int(np.argmin(np.append(alike, False)))

    def memory_report(self, sequences: Iterable[Sequence]) -> MemoryReport:
        """How the blocks of these sequences are used."""
        logical = wasted = 0
        for sequence in sequences:
            held = [sum(b != NULL_BLOCK for b in ids) for ids in sequence.block_ids]
            logical += sum(held)
            covered = len(sequence.block_ids[0]) * self.block_size if sequence.block_ids else 0
            wasted += max(0, covered - sequence.num_computed_tokens) * sum(map(bool, held))
        physical = sum(g.pool.num_held_blocks for g in self.groups)
        return MemoryReport(logical, physical, logical - physical, wasted)

    # The prefix cache.

    def find_prefix(
        self, sequence: Sequence, *, needs_logits: bool, max_blocks: int | None = None
    ) -> PrefixHit:
        """What of the sequence is cached. Not held yet: `admit` at once or forget it.

        With `needs_logits` the last token is left to be computed, and nothing but it: where all of
        a prompt is cached, its last block is copied rather than computed again. `max_blocks`
        bounds the hit.
        """
        if not self.prefix_caching or sequence.request.params.prompt_logprobs is not None:
            return self._no_hit()
        num_tokens = sequence.num_tokens
        self._extend_hashes(sequence, num_tokens)
        usable = num_tokens // self.block_size
        hashes = sequence.block_hashes[: usable if max_blocks is None else max_blocks]
        # Where the KV comes from elsewhere, only the last token can be computed here.
        last_query = num_tokens - 1
        queries = range(0 if needs_logits else last_query, last_query + 1)
        length, found = self._longest_hit(hashes, queries)
        if not any(any(ids) for ids in found):
            return self._no_hit()
        num_hit = min(length * self.block_size, num_tokens - needs_logits)
        return PrefixHit(num_hit, found, copies_last=num_hit < length * self.block_size)

    def _no_hit(self) -> PrefixHit:
        return PrefixHit(0, tuple([] for _ in self.groups), copies_last=False)

    def _longest_hit(
        self, hashes: list[BlockHash], queries: range
    ) -> tuple[int, tuple[list[int], ...]]:
        """The most leading blocks from which every group can go on, and which they are.

        The token behind them, or the nearest of `queries`, is the next to be computed.

        A group without a window needs all of them; one with a window those that the next token
        sees. Each group may shorten the hit, so it is asked again until all agree.
        """
        full: dict[int, list[int]] = {}
        length = len(hashes)
        for i, group in enumerate(self.groups):
            if group.window is None:
                full[i] = group.pool.lookup_chain(hashes[:length])
                length = len(full[i])
        if length == 0:
            return 0, ()
        agreed = -1
        while self._has_window and length != agreed:
            agreed = length
            for group in self.groups:
                if group.window is not None:
                    length = self._windowed_hit(group, hashes, length, queries)
        found = []
        for i, group in enumerate(self.groups):
            if group.window is None:
                found.append(full[i][:length])
            else:
                first = self._first_block(group, length, queries)
                blocks = group.pool.lookup_chain(hashes[first:length])
                found.append([NULL_BLOCK] * first + blocks)
        return length, tuple(found)

    def _windowed_hit(
        self, group: CacheGroup, hashes: list[BlockHash], length: int, queries: range
    ) -> int:
        """The longest hit up to `length` whose blocks in the window are all cached."""
        i = length
        while i > self._first_block(group, length, queries):
            i -= 1
            if group.pool.lookup(hashes[i]) is None:
                length = i
        return length

    def _first_block(self, group: CacheGroup, length: int, queries: range) -> int:
        """The first block that is needed behind a hit of `length` blocks."""
        query = min(max(length * self.block_size, queries[0]), queries[-1])
        return group.first_block(query, self.block_size)

    def commit(self, sequence: Sequence) -> None:
        """Makes the full blocks of the computed tokens findable."""
        num_full = sequence.num_computed_tokens // self.block_size
        if not self.prefix_caching or num_full <= sequence.num_committed_blocks:
            return
        self._extend_hashes(sequence, num_full * self.block_size)
        for group, block_ids in zip(self.groups, sequence.block_ids, strict=True):
            for i in range(sequence.num_committed_blocks, num_full):
                if block_ids[i] != NULL_BLOCK:
                    group.pool.commit(block_ids[i], sequence.block_hashes[i])
        sequence.num_committed_blocks = num_full

    def clear(self) -> int:
        """Forgets every cached prefix. Returns how many blocks were findable."""
        return sum(group.pool.clear() for group in self.groups)

    def drain_events(self) -> CacheEvents:
        """What changed in the cache since the last call, of the group that sees furthest back."""
        events = [group.pool.drain_events() for group in self.groups]
        windows = [np.inf if g.window is None else g.window for g in self.groups]
        return events[int(np.argmax(windows))]

    def _extend_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        known = len(sequence.block_hashes) * self.block_size
        inputs = sequence.request.encoder_inputs
        if num_tokens - known >= self.block_size:
            new = sequence.tokens[known:num_tokens].astype("<u4", copy=False).tobytes()
            extend_chain(
                sequence.block_hashes,
                sequence.request.root,
                new,
                self.block_size,
                partial(_extras, inputs, self.block_size) if inputs else None,
            )

    # Blocks of one sequence.

    def admit(
        self,
        sequence: Sequence,
        hit: PrefixHit,
        num_tokens: int,
        *,
        first_query: int | None = None,
        reserve_to: int = 0,
        margin: int = 0,
    ) -> bool:
        """Gives a sequence without blocks its hits and new blocks to cover `num_tokens`.

        Args:
            first_query: the first token that will be computed here. None: the one behind the hit.
            reserve_to: what it may need to be computed up to here is kept for it.
            margin: free blocks of each group that must remain.

        Returns False, and changes nothing, if a pool has too few free blocks.
        """
        assert not sequence.block_ids, "admit() of a sequence that has blocks"
        query = hit.num_tokens if first_query is None else first_query
        num_blocks = self.num_blocks_for(num_tokens)
        begins = [g.first_block(query, self.block_size) for g in self.groups]
        tables = [
            [NULL_BLOCK] * begin + ids[begin:]
            for begin, ids in zip(begins, hit.block_ids, strict=True)
        ]
        for i, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            held = table[begins[i] :]
            extra = sum(map(group.pool.is_free, held)) + hit.copies_last
            needed = num_blocks - len(table) + extra
            if reserve_to:
                needed = max(needed, self.peak_blocks(group, reserve_to) - len(held) + extra)
            if needed + margin > self.num_free_blocks(i):
                return False
        for i, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            if hit.copies_last:
                self._replace_last(i, group, table, begins[i])
            else:
                group.pool.hold(table[begins[i] :])
            table += group.pool.allocate(num_blocks - len(table))
            self._seats.block_tables[i][sequence.seat, :num_blocks] = table
        sequence.block_ids, sequence.num_trimmed = tables, begins
        sequence.num_committed_blocks = len(hit.block_ids[0]) - hit.copies_last
        sequence.num_computed_tokens = hit.num_tokens
        self._seats.num_covered[sequence.seat] = num_blocks * self.block_size
        if reserve_to:
            sequence.num_reserved = [0] * len(self.groups)
            self._reserve(sequence, reserve_to)
        return True

    def _replace_last(self, index: int, group: CacheGroup, table: list[int], begin: int) -> None:
        """Holds a hit but for its last block, which is copied to one that may be written."""
        source = table.pop()
        group.pool.hold(table[begin:])
        (target,) = group.pool.allocate(1)
        self.operations.copy(index, source, target)
        table.append(target)

    def clear_tail(self, sequence: Sequence, num_tokens: int) -> None:
        """The last block will be filled up to `num_tokens` only, and read as a whole: what was in
        the rest must not be seen, since even masked out a NaN spreads."""
        if num_tokens % self.block_size:
            for i, block_ids in enumerate(sequence.block_ids):
                key = i, block_ids[(num_tokens - 1) // self.block_size]
                if key not in self.operations.copies:
                    self.operations.cleared[key] = None

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extends the tables to cover `num_tokens` and makes the last block its own.

        Returns False if a pool has too few free blocks; blocks behind a window are freed anyway.
        """
        if self._has_window:
            self._trim(sequence)
        num_blocks = self.num_blocks_for(num_tokens)
        have = len(sequence.block_ids[0])
        missing = max(0, num_blocks - have)
        shared = self._shared_tails(sequence) if sequence.shares_tail else ()
        own = sequence.num_reserved
        for i in range(len(self.groups)):
            available = self.num_free_blocks(i) + (own[i] if own else 0)
            if missing + (i in shared) > available:
                return False
        for i in shared:
            self._own_tail(sequence, i)
        sequence.shares_tail = False
        if missing:
            for i, group in enumerate(self.groups):
                new = group.pool.allocate(missing)
                sequence.block_ids[i] += new
                self._seats.block_tables[i][sequence.seat, have:num_blocks] = new
            self._seats.num_covered[sequence.seat] = num_blocks * self.block_size
            self.clear_tail(sequence, num_tokens)
        if own:
            self._reserve(sequence, sequence.num_tokens)
        return True

    def grow_decodes(self, seats: Int64Array) -> bool:
        """One more block, in every group, for each of these plain decodes, whose blocks are full.

        Returns False, and changes nothing, if a pool has too few free blocks.
        """
        count = len(seats)
        if any(count > self.num_free_blocks(i) for i in range(len(self.groups))):
            return False
        columns = self._seats
        sequences = [columns.owners[seat] for seat in seats.tolist()]
        covered = columns.num_covered[seats]
        indices = covered // self.block_size
        for i, group in enumerate(self.groups):
            if group.window is not None:
                for sequence, position in zip(sequences, covered.tolist(), strict=True):
                    assert sequence is not None, "a decode without a sequence"
                    self._trim_group(sequence, i, group, position)
            new = group.pool.allocate(count)
            columns.block_tables[i][seats, indices] = new
            for sequence, block_id in zip(sequences, new, strict=True):
                assert sequence is not None, "a decode without a sequence"
                sequence.block_ids[i].append(block_id)
                self.operations.cleared[i, block_id] = None
        columns.num_covered[seats] = covered + self.block_size
        return True

    def commit_decodes(self, seats: Int64Array, ends: Int64Array) -> None:
        """Makes the last block of each of these plain decodes findable; it has just been filled.

        Args:
            ends: `[num_seats]`, computed tokens of each: multiples of the block size.
        """
        if not self.prefix_caching:
            return
        size = self.block_size
        positions = (ends - size)[:, None] + np.arange(size)
        encoded = self._seats.token_ids[seats[:, None], positions].astype("<u4", copy=False)
        for seat, end, block in zip(seats.tolist(), ends.tolist(), encoded, strict=True):
            sequence = self._seats.owners[seat]
            assert sequence is not None, "a decode without a sequence"
            index, hashes = end // size - 1, sequence.block_hashes
            is_next = sequence.num_committed_blocks == len(hashes) == index
            if not is_next or sequence.request.encoder_inputs:
                self.commit(sequence)
                continue
            extend_chain(hashes, sequence.request.root, block.tobytes(), size)
            for group, block_ids in zip(self.groups, sequence.block_ids, strict=True):
                group.pool.commit(block_ids[index], hashes[index])
            sequence.num_committed_blocks = index + 1

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks back, the tail to be evicted first."""
        for group, block_ids, begin in zip(
            self.groups, sequence.block_ids, sequence.num_trimmed, strict=True
        ):
            group.pool.release(reversed(block_ids[begin:]))
        sequence.block_ids = []
        sequence.num_trimmed = []
        sequence.num_committed_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.shares_tail = False
        self.unreserve(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares the parent's blocks of computed tokens with a child that has a seat and none."""
        num_blocks = self.num_blocks_for(parent.num_computed_tokens)
        for i, group in enumerate(self.groups):
            table = parent.block_ids[i][:num_blocks]
            group.pool.hold(b for b in table if b != NULL_BLOCK)
            child.block_ids.append(table)
            self._seats.block_tables[i][child.seat, :num_blocks] = table
        child.num_trimmed = list(parent.num_trimmed)
        child.block_hashes = parent.block_hashes[:]
        child.num_committed_blocks = parent.num_committed_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        self._seats.num_covered[child.seat] = num_blocks * self.block_size
        parent.shares_tail = child.shares_tail = True

    def unreserve(self, sequence: Sequence) -> None:
        """Lets others have what was kept for it."""
        if sequence.num_reserved is not None:
            for i, count in enumerate(sequence.num_reserved):
                self._num_reserved[i] -= count
            sequence.num_reserved = None

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Keeps free what the sequence may still need to be computed up to `num_tokens`, as far as
        it is free."""
        assert sequence.num_reserved is not None, "a sequence without reservation"
        for i, group in enumerate(self.groups):
            held = len(sequence.block_ids[i]) - sequence.num_trimmed[i]
            missing = self.num_blocks_for(num_tokens) - len(sequence.block_ids[i])
            wanted = min(max(0, self.peak_blocks(group, num_tokens) - held), max(0, missing))
            # What others hold of the blocks its window has passed is not free to be kept for it.
            wanted = min(wanted, sequence.num_reserved[i] + self.num_free_blocks(i))
            self._num_reserved[i] += wanted - sequence.num_reserved[i]
            sequence.num_reserved[i] = wanted

    def _trim(self, sequence: Sequence) -> None:
        """Gives back the blocks that no further query sees."""
        query = sequence.num_computed_tokens
        for i, group in enumerate(self.groups):
            if group.window is not None:
                self._trim_group(sequence, i, group, query)

    def _trim_group(self, sequence: Sequence, index: int, group: CacheGroup, query: int) -> None:
        """The same in one group, where the next query is at position `query`."""
        first, begin = group.first_block(query, self.block_size), sequence.num_trimmed[index]
        if first > begin:
            table = sequence.block_ids[index]
            group.pool.release(table[begin:first])
            table[begin:first] = [NULL_BLOCK] * (first - begin)
            self._seats.block_tables[index][sequence.seat, begin:first] = NULL_BLOCK
            sequence.num_trimmed[index] = first

    def _shared_tails(self, sequence: Sequence) -> list[int]:
        """The groups in which the block of the next token has other holders."""
        index = sequence.num_computed_tokens // self.block_size
        if index >= len(sequence.block_ids[0]):
            return []
        return [
            i
            for i, group in enumerate(self.groups)
            if not group.pool.is_writable(sequence.block_ids[i][index])
        ]

    def _own_tail(self, sequence: Sequence, group_index: int) -> None:
        """Copy on write."""
        pool, table = self.groups[group_index].pool, sequence.block_ids[group_index]
        index = sequence.num_computed_tokens // self.block_size
        (target,) = pool.allocate(1)
        self.operations.copy(group_index, table[index], target)
        pool.release([table[index]])
        table[index] = target
        self._seats.block_tables[group_index][sequence.seat, index] = target

    # Swap.

    def can_swap_out(self, sequences: list[Sequence]) -> bool:
        """Whether the host pools have room for all of them together."""
        for i, group in enumerate(self.groups):
            blocks = {b for s in sequences for b in self._computed_blocks(s, i)}
            if group.host is None or len(blocks) > group.host.num_free_blocks:
                return False
        return True

    def num_swapped_blocks(self, sequences: list[Sequence]) -> int:
        """Blocks that swapping these sequences would move, over all groups."""
        return sum(
            len({b for s in sequences for b in self._computed_blocks(s, i)})
            for i in range(len(self.groups))
        )

    def swap_out(self, sequences: list[Sequence]) -> None:
        """Moves the KV of sequences that share blocks to the host, each block once."""
        for i, group in enumerate(self.groups):
            assert group.host is not None, "swap_out() without host blocks"
            places: dict[int, int] = {}
            for sequence in sequences:
                table: list[int] = []
                for block_id in sequence.block_ids[i][: self._num_computed_blocks(sequence)]:
                    if block_id == NULL_BLOCK:
                        table.append(NULL_BLOCK)
                        continue
                    if block_id in places:
                        group.host.hold([places[block_id]])
                    else:
                        (places[block_id],) = group.host.allocate(1)
                    table.append(places[block_id])
                sequence.host_block_ids.append(table)
            for block_id, place in places.items():
                # A copy that was planned for this step and not made yet is read at its source.
                source = self.operations.copies.get((i, block_id), block_id)
                self.operations.swap_out.append(BlockMove(i, source, place))
        for sequence in sequences:
            num_computed = sequence.num_computed_tokens
            committed = sequence.num_committed_blocks
            self.free(sequence)
            sequence.num_computed_tokens, sequence.num_committed_blocks = num_computed, committed

    def swap_in(self, sequences: list[Sequence], *, margin: int = 0) -> bool:
        """Brings swapped sequences back; they have seats. What is still cached is not copied.

        Returns False, and changes nothing, if a pool has too few free blocks.
        """
        plans = [self._swap_in_plan(sequences, i) for i in range(len(self.groups))]
        for i, (found, missing) in enumerate(plans):
            revived = sum(map(self.groups[i].pool.is_free, found.values()))
            if revived + len(missing) + margin > self.num_free_blocks(i):
                return False
        for i, (found, missing) in enumerate(plans):
            self._swap_in_group(sequences, i, found, missing)
        for sequence in sequences:
            num_blocks = len(sequence.block_ids[0])
            sequence.host_block_ids = []
            sequence.shares_tail = True  # a sibling may have it too, or the prefix cache
            self._seats.num_covered[sequence.seat] = num_blocks * self.block_size
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Frees the host blocks of a sequence, from the next step on."""
        for i, table in enumerate(sequence.host_block_ids):
            self._host_releases.append((i, [b for b in table if b != NULL_BLOCK]))
        sequence.host_block_ids = []

    def begin_step(self) -> None:
        """Forgets the operations of the last step, which have been carried out, and frees what
        they read: so what comes in and what goes out in one step never meet."""
        self.operations = MemoryOperations()
        for i, block_ids in self._host_releases:
            host = self.groups[i].host
            assert host is not None, "host blocks without a pool"
            host.release(block_ids)
        self._host_releases = []

    def _swap_in_plan(
        self, sequences: list[Sequence], group_index: int
    ) -> tuple[dict[int, int], list[int]]:
        """Host blocks whose content is still cached, with where; and those to be copied."""
        pool = self.groups[group_index].pool
        found: dict[int, int] = {}
        missing: dict[int, None] = {}
        for sequence in sequences:
            for i, place in enumerate(sequence.host_block_ids[group_index]):
                if place == NULL_BLOCK or place in found or place in missing:
                    continue
                is_full = i < sequence.num_committed_blocks and self.prefix_caching
                block_id = pool.lookup(sequence.block_hashes[i]) if is_full else None
                if block_id is None:
                    missing[place] = None
                else:
                    found[place] = block_id
        return found, list(missing)

    def _swap_in_group(
        self,
        sequences: list[Sequence],
        group_index: int,
        found: dict[int, int],
        missing: list[int],
    ) -> None:
        pool = self.groups[group_index].pool
        pool.hold(found.values())
        allocated = dict(zip(missing, pool.allocate(len(missing)), strict=True))
        for place, block_id in allocated.items():
            self.operations.swap_in.append(BlockMove(group_index, place, block_id))
        blocks = {**found, **allocated, NULL_BLOCK: NULL_BLOCK}
        taken: set[int] = {NULL_BLOCK}
        for sequence in sequences:
            places = sequence.host_block_ids[group_index]
            pool.hold(blocks[p] for p in places if p in taken and p != NULL_BLOCK)
            taken.update(places)
            table = [blocks[p] for p in places]
            sequence.block_ids.append(table)
            sequence.num_trimmed.append(table.count(NULL_BLOCK))
            self._seats.block_tables[group_index][sequence.seat, : len(table)] = table
            self._host_releases.append((group_index, [p for p in places if p != NULL_BLOCK]))

    def _num_computed_blocks(self, sequence: Sequence) -> int:
        return self.num_blocks_for(sequence.num_computed_tokens)

    def _computed_blocks(self, sequence: Sequence, group_index: int) -> list[int]:
        """The blocks that hold computed tokens, without those a window has passed."""
        if not sequence.block_ids:
            return []
        table = sequence.block_ids[group_index][: self._num_computed_blocks(sequence)]
        return [b for b in table if b != NULL_BLOCK]

    # Checks.

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Asserts that pools, tables, columns and reservations agree."""
        sequences = list(sequences)
        for i, group in enumerate(self.groups):
            group.pool.check_integrity(s.block_ids[i] for s in sequences if s.block_ids)
            if group.host is not None:
                pending = [ids for at, ids in self._host_releases if at == i]
                swapped = [s.host_block_ids[i] for s in sequences if s.host_block_ids]
                group.host.check_integrity([*swapped, *pending])
            reserved = sum(s.num_reserved[i] for s in sequences if s.num_reserved is not None)
            assert reserved == self._num_reserved[i], "reservations do not add up"
            assert reserved <= group.pool.num_free_blocks, "more is reserved than is free"
        for sequence in sequences:
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        lengths = {len(ids) for ids in sequence.block_ids}
        assert len(lengths) <= 1, "tables of unequal length"
        if sequence.block_ids:
            covered = lengths.pop() * self.block_size
            assert sequence.num_computed_tokens <= covered, "computed beyond its blocks"
            if sequence.seats is not None:
                assert covered == self._seats.num_covered[sequence.seat]
        if sequence.seats is not None:
            for i, ids in enumerate(sequence.block_ids):
                row = self._seats.block_tables[i][sequence.seat]
                assert row[: len(ids)].tolist() == ids, "the seat's table is another"
                assert not row[len(ids) :].any(), "the seat's table goes on"


def _extras(inputs: SequenceOf[EncoderInput], block_size: int, index: int) -> bytes:
    """What a block holds of encoder inputs: the content of each, and where it lies in the block."""
    begin, end = index * block_size, (index + 1) * block_size
    return b"".join(
        struct.pack("<iI", i.start - begin, len(i.content_hash)) + i.content_hash
        for i in inputs
        if i.start < end and i.end > begin
    )
