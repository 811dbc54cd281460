"""Inbox: bounded queue between the readers of an attempt's calls and its one consumer.

An `asyncio.Queue` does the same and more, at several times the cost of a message.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """Bounded queue of several readers and one consumer.

    A reader whose `put` has filled the inbox waits for `room` before it reads on, which is
    backpressure on its source. Each reader may be one item beyond the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[_Item] = deque()
        self._arrival: asyncio.Future[None] | None = None  # the consumer waits for it
        self._room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item) -> bool:
        """Adds an item; returns whether the inbox is full now."""
        self._items.append(item)
        arrival = self._arrival
        if arrival is not None:
            self._arrival = None
            if not arrival.done():
                arrival.set_result(None)
        return len(self._items) >= self._capacity

    async def room(self) -> None:
        """Waits until the inbox is not full."""
        while len(self._items) >= self._capacity:
            self._room.clear()
            await self._room.wait()

    async def arrival(self) -> None:
        """Waits until there is an item."""
        while not self._items:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def take(self) -> _Item:
        """Removes and returns the oldest item; there has to be one."""
        item = self._items.popleft()
        if len(self._items) == self._capacity - 1:
            self._room.set()
        return item
