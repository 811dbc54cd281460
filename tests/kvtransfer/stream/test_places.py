"""Batches of places, and the sizes of the parts in which they are made."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton_kvtransfer.stream.places import checked_places, places
from baton_kvtransfer.stream.send_ahead import PartSizes
from baton_kvtransfer.stream.transfer_stream import TransferStream
from tests.support.kvtransfer.loopback import filled_pool, layout_of


@pytest.mark.parametrize(
    ("num_layers", "num_blocks", "sizes"),
    [(512, 600, [8, 8, 16, 32, 64, 128, 128, 128, 88]), (2**17, 3, [1, 1, 1])],
)
def test_part_sizes_grow_up_to_their_limit(num_layers, num_blocks, sizes):
    parts = PartSizes().parts(num_blocks, layout_of(num_layers).block_bytes)
    assert [len(part) for part in parts] == sizes


async def test_place_batches_grow_only_with_checksums():
    pool = filled_pool(20, layout_of(512))
    checked = checked_places(TransferStream(), 0, 0, range(1, 21), pool)
    assert [len(batch.source_blocks) async for batch in checked] == [8, 8, 4]
    assert [len(b.source_blocks) async for b in places(0, 0, range(1, 21), pool)] == [20]


async def test_place_batches_without_checksums_are_of_limited_size():
    pool: Any = SimpleNamespace(layout=layout_of(512))  # which nothing reads
    batches = places(0, 0, range(1100), pool)
    assert [len(batch.source_blocks) async for batch in batches] == [1024, 76]
