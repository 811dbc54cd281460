"""The block pool against a model that is too simple to be wrong."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK

HASHES = [bytes([i]) * 16 for i in range(6)]


class PoolModel(RuleBasedStateMachine):
    """Holders keep lists of blocks; the model keeps counts, hashes and the order of eviction.

    `cached_free` is the model's LRU: findable blocks without a holder, next victim first. Blocks
    without content come before them in any order.
    """

    @initialize(num_blocks=st.integers(1, 8))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.numbers = range(1, num_blocks + 1)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.cached_free: list[int] = []
        self.replayed: set[bytes] = set()

    def count(self, block_id: int) -> int:
        return sum(table.count(block_id) for table in self.holders)

    def free(self) -> set[int]:
        return {b for b in self.numbers if self.count(b) == 0}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.free()
        wanted = data.draw(st.integers(0, len(free)))
        blocks = self.pool.allocate(wanted)
        assert len(blocks) == len(set(blocks)) == wanted
        assert set(blocks) <= free
        assert NULL_BLOCK not in blocks
        num_evicted = max(0, wanted - (len(free) - len(self.cached_free)))
        victims, self.cached_free = self.cached_free[:num_evicted], self.cached_free[num_evicted:]
        assert [b for b in blocks if b in self.content] == victims, "not least recently used first"
        for victim in victims:
            del self.content[victim]
        self.holders.append(blocks)

    @rule(data=st.data())
    def hold_found_blocks(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.sampled_from(HASHES), unique=True))
        found = [b for b in map(self.pool.lookup, wanted) if b is not None]
        self.pool.hold(found)
        self.cached_free = [b for b in self.cached_free if b not in found]
        self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_tail_first(self, data: st.DataObject) -> None:
        table = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(reversed(table))
        for block_id in reversed(table):
            if self.count(block_id) == 0 and block_id in self.content:
                self.cached_free.append(block_id)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def commit(self, data: st.DataObject, block_hash: bytes) -> None:
        held = sorted({b for table in self.holders for b in table})
        block_id = data.draw(st.sampled_from(held))
        self.pool.commit([block_id], [block_hash])
        if block_id not in self.content and block_hash not in self.content.values():
            self.content[block_id] = block_hash

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        victims = data.draw(st.lists(st.sampled_from([NULL_BLOCK, *self.numbers])))
        found = {b for b in victims if b in self.content}
        assert self.pool.evict(victims) == len(found)
        for block_id in found:
            del self.content[block_id]
        self.cached_free = [b for b in self.cached_free if b not in found]

    @rule(wanted=st.lists(st.sampled_from(HASHES)))
    def look_a_chain_up(self, wanted: list[bytes]) -> None:
        blocks = {h: b for b, h in self.content.items()}
        expected = []
        for block_hash in wanted:
            if block_hash not in blocks:
                break
            expected.append(blocks[block_hash])
        assert self.pool.lookup_chain(wanted) == expected

    @rule()
    def clear(self) -> None:
        assert self.pool.clear() == len(self.content)
        self.content.clear()
        self.cached_free.clear()

    @rule()
    def drain(self) -> None:
        events = self.pool.drain_events()
        assert not set(events.stored) & set(events.removed)
        if events.cleared:
            self.replayed.clear()
        assert set(events.removed) <= self.replayed, "removed what was never stored"
        assert not set(events.stored) & self.replayed, "stored twice"
        self.replayed = (self.replayed - set(events.removed)) | set(events.stored)
        assert self.replayed == set(self.content.values())
        assert not self.pool.drain_events(), "a change was told twice"

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity(self.holders)
        assert self.pool.num_free_blocks == len(self.free())
        assert self.pool.num_cached_blocks == len(self.cached_free)
        found = {h: self.pool.lookup(h) for h in HASHES}
        assert {b: h for h, b in found.items() if b is not None} == self.content
        for block_id in self.numbers:
            count, is_found = self.count(block_id), block_id in self.content
            assert self.pool.is_free(block_id) == (count == 0)
            assert self.pool.is_writable(block_id) == (count == 1 and not is_found)
        assert self.pool.num_held_blocks == len(self.numbers) - len(self.free())


TestTheBlockPoolAgreesWithItsModel = PoolModel.TestCase
TestTheBlockPoolAgreesWithItsModel.settings = settings(max_examples=60, stateful_step_count=40)


class ManyRuns(PoolModel):
    """The same for longer."""


TestTheBlockPoolAgreesWithItsModelInManyRuns = pytest.mark.nightly(ManyRuns.TestCase)
TestTheBlockPoolAgreesWithItsModelInManyRuns.settings = settings(
    max_examples=1500, stateful_step_count=60
)


def cached(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    """Allocates one block per hash and makes it findable."""
    blocks = pool.allocate(len(hashes))
    pool.commit(blocks, hashes)
    return blocks


def test_block_pool_evicts_a_sequence_from_its_tail():
    pool = BlockPool(3)
    pool.release(reversed(cached(pool, HASHES[:3])))
    pool.allocate(1)
    assert [pool.lookup(h) is not None for h in HASHES[:3]] == [True, True, False]
    pool.allocate(1)
    assert [pool.lookup(h) is not None for h in HASHES[:3]] == [True, False, False]


def test_block_pool_evicts_the_least_recently_used_first():
    pool = BlockPool(4)
    old, new = cached(pool, HASHES[:2]), cached(pool, HASHES[2:4])
    pool.release(reversed(old))
    pool.release(reversed(new))
    pool.hold(old)  # used again
    pool.release(reversed(old))
    pool.allocate(2)
    assert [pool.lookup(h) is not None for h in HASHES[:4]] == [True, True, False, False]


def test_block_pool_takes_empty_blocks_before_cached_ones():
    pool = BlockPool(4)
    kept = cached(pool, HASHES[:2])
    plain = pool.allocate(2)
    pool.release(reversed(kept))
    pool.release(reversed(plain))
    assert set(pool.allocate(2)) == set(plain)
    assert all(pool.lookup(h) is not None for h in HASHES[:2])


def test_commit_skips_null_blocks():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.commit([NULL_BLOCK, block], HASHES[:2])
    assert pool.lookup_chain(HASHES[1:2]) == [block]
    assert pool.lookup(HASHES[0]) is None
    assert pool.drain_events().stored == (HASHES[1],)


def test_pool_that_reports_no_changes_notes_none():
    pool = BlockPool(1)
    pool.reports_changes = False
    (block,) = cached(pool, HASHES[:1])
    pool.release([block])
    pool.allocate(1)
    assert not pool.drain_events()


def test_drain_events_omits_blocks_stored_and_removed_between():
    pool = BlockPool(1)
    pool.release(cached(pool, HASHES[:1]))
    pool.allocate(1)
    assert not pool.drain_events()


def test_drain_events_hides_blocks_stored_before_a_clear():
    pool = BlockPool(2)
    cached(pool, HASHES[:1])
    assert pool.clear() == 1
    cached(pool, HASHES[1:2])
    events = pool.drain_events()
    assert (events.cleared, events.stored, events.removed) == (True, (HASHES[1],), ())


def test_release_beyond_holders_is_caught():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(blocks)


def test_allocate_beyond_free_blocks_is_caught():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="beyond the free blocks"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2


def test_allocate_prefers_evicted_blocks_to_cached_ones():
    pool = BlockPool(3)
    blocks = cached(pool, HASHES[:3])
    pool.release(blocks)
    assert pool.evict([blocks[2], blocks[2]]) == 1
    assert pool.allocate(1) == [blocks[2]]
    assert [pool.lookup(h) is not None for h in HASHES[:3]] == [True, True, False]


def test_held_block_becomes_writable_when_evicted():
    pool = BlockPool(2)
    (block,) = cached(pool, HASHES[:1])
    assert not pool.is_writable(block)
    pool.evict([block])
    assert pool.is_writable(block)
    assert pool.num_held_blocks == 1
    pool.commit([block], [HASHES[1]])
    assert pool.lookup(HASHES[1]) == block


def test_lookup_keeps_the_first_block_of_equal_content():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.commit([first], [HASHES[0]])
    pool.commit([second], [HASHES[0]])
    assert pool.lookup(HASHES[0]) == first
    assert pool.is_writable(second)
