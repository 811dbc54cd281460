"""Cached blocks and prefixes that others get, and sequences that go on there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster.prefix import hash_chain
from baton.engine.request import FinishReason, KvSource, Purpose
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.prefix_cache import PrefixCache
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from tests.support.scheduler.fakes import cache_group
from tests.support.scheduler.harness import ROOTS, Harness, request

PROMPT = [1, 2, 3] * 6  # 18 tokens, 4 in a block


def hashes_of(harness: Harness, prompt: list[int]) -> list[bytes]:
    return hash_chain(ROOTS[0], prompt, harness.config.block_size)


def computed(harness: Harness, name: str, prompt: list[int] = PROMPT) -> None:
    harness.add(request(name, prompt, max_tokens=1))
    harness.run()


def pulling(name: str = "p", num_external_tokens: int = 12) -> object:
    return request(
        name,
        PROMPT,
        purpose=Purpose.PREFILL,
        kv_source=KvSource.EXTERNAL,
        num_external_tokens=num_external_tokens,
    )


@pytest.mark.parametrize("window", [None, 3, 5, 9])
def test_fetched_prefix_is_not_computed_and_becomes_cached(window):
    groups = [cache_group(20)] if window is None else [cache_group(20), cache_group(20, window)]
    harness = Harness(groups)
    harness.add(pulling())
    (allocation,) = harness.step().external
    assert (len(allocation.block_ids[0]), allocation.num_hit_blocks) == (3, 0)
    harness.arrive("p", 2)
    computed(harness, "early")  # nothing of it is found yet
    assert harness.scheduler.stats().num_hit_tokens == 0
    harness.deliver("p")
    harness.step()
    assert harness.computed["p"] == (12, 18)
    harness.run()
    harness.release("p")
    stats = harness.scheduler.stats()
    assert (stats.num_pulled_tokens, stats.num_hit_tokens) == (12, 12)
    harness.check_empty()


def test_cached_prefix_is_neither_fetched_nor_computed():
    harness = Harness(20)
    computed(harness, "before")
    harness.add(pulling())
    (allocation,) = harness.step().external
    assert allocation.block_ids == ()
    assert harness.computed["p"] == (16, 18)
    harness.run()
    harness.release("p")
    assert harness.scheduler.stats().num_pulled_tokens == 0
    harness.check_empty()


def test_prefix_is_computed_when_its_fetch_fails():
    harness = Harness(20)
    harness.add(pulling())
    harness.step()
    harness.arrive("p", 2)
    harness.fail("p")
    harness.step()
    assert harness.computed["p"] == (0, 18)
    harness.run()
    harness.release("p")
    harness.check_empty()


def test_prompt_awaiting_its_prefix_reserves_all_its_blocks():
    harness = Harness(5)
    harness.add(pulling())
    harness.step()
    harness.add(request("other", [5] * 4, max_tokens=1))
    harness.step()
    assert not harness.computed  # both free blocks are the first one's
    harness.deliver("p")
    harness.run()
    harness.release("p")
    harness.run()
    harness.check_empty()


def test_pinned_blocks_are_not_evicted():
    harness = Harness(8)
    computed(harness, "a")
    scheduler, hashes = harness.scheduler, hashes_of(harness, PROMPT)
    (table,) = scheduler.pin("x", [*hashes, bytes(16)])
    assert len(table) == 4
    scheduler.check_integrity()
    assert scheduler.stats().num_held_blocks == 4
    for i in range(3):
        computed(harness, f"b{i}", [5 + i] * 15)
    assert scheduler.pin("y", hashes) == (table,)
    scheduler.flush_cache()
    assert scheduler.pin("z", hashes) == ((),)
    for name in ("x", "y", "z", "never"):
        scheduler.unpin(name)
        scheduler.check_integrity()
    assert scheduler.stats().num_held_blocks == 0


def test_pin_takes_no_block_reserved_for_a_sequence():
    harness = Harness(8, max_num_batched_tokens=8)
    computed(harness, "a")
    harness.add(request("p", [9] * 32, purpose=Purpose.PREFILL))
    harness.step()  # holds some of the other blocks and is promised the rest
    assert harness.scheduler.pin("x", hashes_of(harness, PROMPT)) == ((),)
    harness.run()
    harness.release("p")
    assert harness.scheduler.stats().num_held_blocks == 0


@given(
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(1, 20),
)
def test_pin_returns_the_longest_prefix_valid_in_every_group(full, windowed, window):
    pools = [BlockPool(8), BlockPool(8)]
    hashes = [bytes([i]) * 16 for i in range(8)]
    for pool, present in zip(pools, (full, windowed), strict=True):
        blocks = zip(pool.allocate(8), present, strict=True)
        pool.commit([b if is_there else NULL_BLOCK for b, is_there in blocks], hashes)
    groups = [CacheGroup(pools[0]), CacheGroup(pools[1], window)]
    tables = PrefixCache(groups, 4).find_run(hashes)

    def is_whole(length: int) -> bool:
        # What a claimant of so many blocks is sent, as `baton_kvtransfer.lease.block_range` says.
        first = max(0, 4 * length - window) // 4
        return all(full[:length]) and all(windowed[first:length])

    longest = max(length for length in range(9) if length == 0 or is_whole(length))
    assert [len(table) for table in tables] == [longest, longest]
    assert NULL_BLOCK not in tables[0]
    first = max(0, 4 * longest - window) // 4
    assert [b != NULL_BLOCK for b in tables[1]] == [i >= first for i in range(longest)]


@pytest.mark.parametrize("drafts", [0, 3])
def test_suspend_keeps_the_kv_of_all_but_the_last_token(drafts):
    harness = Harness([cache_group(20), cache_group(20, 5)], max_drafts=drafts)
    harness.add(request("r", PROMPT, max_tokens=20, speculates=drafts > 0))
    for _ in range(4):
        harness.step()
    sequence = harness.live["r"].request.sequences[0]
    tokens = sequence.token_ids.tolist()
    harness.scheduler.suspend("r")
    plan = harness.scheduler.schedule()
    progress = harness.scheduler.apply(plan, harness.runner.run(plan)).others[-1]
    tokens.append(int(sequence.token_ids[-1]))
    assert progress.finish_reason is FinishReason.SUSPENDED
    assert progress.token_ids == (tokens[-1],)
    assert progress.position == len(tokens) - 1 - len(PROMPT)
    assert progress.num_computed_tokens == len(tokens) - 1
    full, windowed = progress.block_ids
    num_blocks = -(-progress.num_computed_tokens // 4)
    assert NULL_BLOCK not in full[:num_blocks]
    first = max(0, progress.num_computed_tokens - 5) // 4
    assert NULL_BLOCK not in windowed[first:num_blocks]
    harness.scheduler.check_integrity()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_kept) == (0, 1)
    harness.scheduler.suspend("r")
    assert harness.scheduler.schedule().num_tokens == 0
    harness.scheduler.end_sequence("r", 0)  # is over already
    harness.scheduler.check_integrity()
    harness.scheduler.abort("r")
    assert harness.scheduler.stats().num_held_blocks == 0


def test_suspend_ignores_unknown_and_forking_requests():
    harness = Harness(20, max_num_batched_tokens=6)
    harness.add(request("several", PROMPT, n=2, temperature=1.0), request("r", PROMPT))
    harness.scheduler.suspend("unknown")
    harness.scheduler.suspend("several")  # is to fork
    harness.run()
    harness.check_empty()
