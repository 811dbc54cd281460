"""Inbox of an attempt: order, backpressure on its readers, and a consumer that gives up."""

import asyncio

from baton_router.lifecycle.attempts.inbox import Inbox


async def _read(inbox: Inbox[int], items: range, taken: list[int]) -> None:
    for item in items:
        taken.append(item)
        if inbox.put(item):
            await inbox.room()


async def _take(inbox: Inbox[int]) -> int:
    await inbox.arrival()
    return inbox.take()


async def test_inbox_keeps_order_when_consumer_waits():
    inbox: Inbox[int] = Inbox(4)
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as group:
        group.create_task(_read(inbox, range(100), []))
        assert [await _take(inbox) for _ in range(100)] == list(range(100))
    assert not inbox


async def test_inbox_stops_each_reader_when_it_is_full():
    inbox: Inbox[int] = Inbox(4)
    read: list[int] = []
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as group:
        for start in (0, 100):
            group.create_task(_read(inbox, range(start, start + 50), read))
        for num_taken in range(100):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(inbox) <= 5
            assert len(read) <= num_taken + 5
            await _take(inbox)
    assert len(read) == 100


async def test_inbox_keeps_items_when_consumer_is_cancelled():
    inbox: Inbox[int] = Inbox(4)
    consumer = asyncio.create_task(_take(inbox))
    await asyncio.sleep(0)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    inbox.put(7)
    assert await _take(inbox) == 7
