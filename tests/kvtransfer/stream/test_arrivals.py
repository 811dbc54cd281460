"""Arrivals: batches that are written while others arrive."""

import asyncio
from typing import Any

from baton_kvtransfer.stream.arrivals import Arrivals
from baton_kvtransfer.stream.block_batch import BlockBatch


async def test_arrivals_join_batches_that_arrive_during_a_write():
    written, going_on = [], asyncio.Event()

    async def write(batch: BlockBatch, targets: Any) -> None:
        written.append((batch.group, batch.first_block, batch.source_blocks, targets))
        await going_on.wait()

    arrivals = Arrivals(write)
    writing = asyncio.create_task(arrivals.write_all())
    for group, first in ((0, 0), (0, 1), (0, 2), (1, 0)):
        await arrivals.put(BlockBatch(group, first, source_blocks=(9 - first,)), (5 + first,))
        await asyncio.sleep(0.01)
    assert written == [(0, 0, (9,), [5])]
    going_on.set()
    await arrivals.flush()
    assert written[1:] == [(0, 1, (8, 7), [6, 7]), (1, 0, (9,), [5])]
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
