"""Slots that holders take in turns."""

import asyncio
import math

import pytest

from baton.fairness.fair_slots import FairSlots
from tests.support.waiting import settled


class GaveWayError(Exception):
    pass


class Asked:
    """Slots, and what became of each that asked for one."""

    def __init__(
        self, num_slots: int, *, max_waiting: int = 100, max_bytes: float = math.inf
    ) -> None:
        self.slots = FairSlots(
            num_slots, GaveWayError, max_waiting=max_waiting, max_bytes=max_bytes
        )
        self.begun: list[str] = []
        self.refused: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str, num_bytes: int = 0) -> None:
        """Asks for slots of the holders whose letters the names begin with."""
        for name in names:
            self._tasks[name] = asyncio.create_task(self._begin(name, num_bytes))
        await settled()

    async def end(self, name: str) -> None:
        self.begun.remove(name)
        self.slots.release(name[0])
        await settled()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()

    async def _begin(self, name: str, num_bytes: int) -> None:
        try:
            await self.slots.acquire(name[0], num_bytes)
        except GaveWayError:
            self.refused.append(name)
        else:
            self.begun.append(name)


async def test_fair_slots_keep_one_free_of_each_holder():
    asked = Asked(3)
    await asked.ask("a0", "a1", "a2", "b0")
    assert asked.begun == ["a0", "a1", "b0"]
    await asked.end("b0")
    assert asked.begun == ["a0", "a1"]
    await asked.end("a0")
    assert asked.begun == ["a1", "a2"]


async def test_fair_slots_give_the_only_one_to_any_holder():
    asked = Asked(1)
    await asked.ask("a0", "a1")
    assert asked.begun == ["a0"]
    await asked.end("a0")
    assert asked.begun == ["a1"]


async def test_fair_slots_keep_one_free_of_each_as_they_grow():
    asked = Asked(0)
    await asked.ask("a0", "a1", "a2")
    assert asked.begun == []
    for begun in (["a0"], ["a0"], ["a0", "a1"]):
        asked.slots.add()
        await settled()
        assert asked.begun == begun
    await asked.ask("b0")
    assert asked.begun == ["a0", "a1", "b0"]


async def test_fair_slots_pass_to_the_next_holder():
    asked, order = Asked(1), []
    await asked.ask("a0", "a1", "a2", "a3", "b0", "c0")
    while asked.begun:
        order += asked.begun
        await asked.end(*asked.begun)
    assert order.index("b0") <= 2
    assert order.index("c0") <= 3
    assert sorted(order) == ["a0", "a1", "a2", "a3", "b0", "c0"]
    assert asked.slots.num_waiting == 0


async def test_fair_slots_refuse_newest_of_largest_holder():
    asked = Asked(1, max_waiting=4)
    await asked.ask("a0", "a1", "a2", "a3", "a4", "a5")
    assert asked.refused == ["a5"]
    await asked.ask("b0", "b1", "b2")
    assert sorted(asked.refused) == ["a3", "a4", "a5", "b2"]


async def test_fair_slots_refuse_holder_without_a_name():
    slots = FairSlots(1, GaveWayError, max_waiting=1)
    await slots.acquire("")
    waiting = asyncio.create_task(slots.acquire(""))
    await settled()
    with pytest.raises(GaveWayError):
        await slots.acquire("")
    slots.release("")
    await waiting


async def test_fair_slots_refuse_holder_of_most_bytes():
    asked = Asked(1, max_bytes=100)
    await asked.ask("a0", num_bytes=1000)  # which runs
    await asked.ask("a1", num_bytes=150)  # which waits alone
    await asked.ask("b0", num_bytes=90)
    assert asked.refused == ["a1"]
    await asked.ask("c0", "c1", num_bytes=5)
    await asked.ask("c2", num_bytes=5)
    assert asked.refused == ["a1", "b0"]
    assert asked.slots.num_bytes == 15


async def test_fair_slots_forget_those_that_are_cancelled():
    asked = Asked(1, max_waiting=2)
    await asked.ask("a0", "a1", "a2")
    await asked.leave("a1")
    assert asked.slots.num_waiting == 1
    await asked.end("a0")
    assert asked.begun == ["a2"]
    granted = asyncio.create_task(asked.slots.acquire("b"))
    await settled()
    asked.slots.release("a")  # it has its slot now, and is cancelled before it knows
    granted.cancel()
    await asyncio.gather(granted, return_exceptions=True)
    await asked.ask("c0")
    assert asked.begun == ["a2", "c0"]


async def test_fair_slots_refuse_all_that_wait_at_their_end():
    asked = Asked(1)
    await asked.ask("a0", "a1", "b0")
    asked.slots.close()
    await settled()
    assert sorted(asked.refused) == ["a1", "b0"]
