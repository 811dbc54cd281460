"""Locality index on a recorded workload: it finds the blocks that can be reused, exactly."""

from pathlib import Path

import pytest

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex
from baton_simulator.traces import read_mooncake

NUM_REUSABLE = 105_710
NUM_BLOCKS = 288_500
NUM_DISTINCT = 182_790


@pytest.mark.parametrize(("num_workers", "own_share"), [(1, 1.0), (8, 0.37), (64, 0.17)])
def test_index_finds_every_reusable_block(
    conversation_trace: Path, num_workers: int, own_share: float
) -> None:
    """Workers store prompts in turn. The longest match of any worker is all that is reusable; that
    of the worker whose turn it is is `own_share` of it, which is what round-robin placement keeps.
    """
    index = LocalityIndex()
    num_seen = num_found = num_own = 0
    for number, row in enumerate(read_mooncake(conversation_trace)):
        worker = f"worker-{number % num_workers}"
        hashes = [block.to_bytes(16, "big") for block in row.block_ids or ()]
        matches = index.match(hashes)
        num_seen += len(hashes)
        num_found += max(matches.values(), default=0)
        num_own += matches.get(worker, 0)
        index.apply(worker, 1, KvEvents(stored=tuple(hashes)))
    assert (num_found, num_seen, len(index)) == (NUM_REUSABLE, NUM_BLOCKS, NUM_DISTINCT)
    assert round(num_own / NUM_REUSABLE, 2) == own_share
