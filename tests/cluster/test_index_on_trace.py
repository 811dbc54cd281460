"""The index on a recorded workload: it finds what can be reused, to the block."""

from pathlib import Path

import pytest

from baton.cluster.events import KvEvents
from baton.cluster.index import LocalityIndex
from bench.traces import read_mooncake

NUM_REUSABLE = 105_710
NUM_BLOCKS = 288_500
NUM_DISTINCT = 182_790


@pytest.mark.parametrize("num_workers", [1, 8, 64])
def test_with_unbounded_caches_all_that_is_reusable_is_found(
    conversation_trace: Path, num_workers: int
) -> None:
    """Whichever worker holds a prefix: they take turns, and the longest match of any counts."""
    index = LocalityIndex()
    num_seen = num_found = 0
    for number, row in enumerate(read_mooncake(conversation_trace)):
        hashes = [block.to_bytes(16, "big") for block in row.block_ids or ()]
        num_seen += len(hashes)
        num_found += max(index.match(hashes).values(), default=0)
        index.apply(f"worker-{number % num_workers}", 1, KvEvents(stored=tuple(hashes)))
    assert (num_found, num_seen, len(index)) == (NUM_REUSABLE, NUM_BLOCKS, NUM_DISTINCT)
    assert round(num_found / num_seen, 4) == 0.3664


def test_round_robin_finds_little_more_than_a_third_of_it(conversation_trace: Path) -> None:
    index = LocalityIndex()
    num_found = 0
    for number, row in enumerate(read_mooncake(conversation_trace)):
        hashes = [block.to_bytes(16, "big") for block in row.block_ids or ()]
        worker = f"worker-{number % 8}"
        num_found += index.match(hashes).get(worker, 0)
        index.apply(worker, 1, KvEvents(stored=tuple(hashes)))
    assert round(num_found / NUM_REUSABLE, 2) == 0.37
