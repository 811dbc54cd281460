"""Threads of the engine for tasks of several tenants."""

import asyncio
import os
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar

import pytest

from baton.errors import OverloadedError
from baton.fairness.fair_threads import FairThreads, Task
from tests.support.waiting import until, wait_until

ASKED = ContextVar("ASKED", default="")


class Log:
    """Tasks that wait for an event, and what became of them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.refused: list[str] = []
        self.ended = threading.Semaphore(0)

    def task(self, holder: str, number: int, until: threading.Event) -> Task:
        name = f"{holder}{number}"

        def run() -> None:
            self.begun.append(name)
            assert until.wait(10.0)
            self.ended.release()

        return Task(holder, run, lambda: self.refused.append(name))


@contextmanager
def closing(threads: FairThreads):
    try:
        yield threads
    finally:
        threads.close()


def test_fair_threads_keep_one_free_of_each_holder():
    log, gate = Log(), threading.Event()
    with closing(FairThreads(3, 100, "t")) as threads:
        for number in range(5):
            threads.submit(log.task("a", number, gate))
        wait_until(lambda: len(log.begun) == 2)
        threads.submit(log.task("b", 0, gate))
        wait_until(lambda: len(log.begun) == 3)
        assert sorted(log.begun) == ["a0", "a1", "b0"]
        gate.set()
        for _ in range(6):
            assert log.ended.acquire(timeout=10.0)
    assert sorted(log.begun) == ["a0", "a1", "a2", "a3", "a4", "b0"]


def test_fair_threads_take_turns_by_holder():
    log, gate, free = Log(), threading.Event(), threading.Event()
    free.set()
    with closing(FairThreads(1, 100, "t")) as threads:
        threads.submit(log.task("a", 0, gate))
        wait_until(lambda: log.begun == ["a0"])
        for number in range(1, 4):
            threads.submit(log.task("a", number, free))
        threads.submit(log.task("b", 0, free))
        gate.set()
        for _ in range(5):
            assert log.ended.acquire(timeout=10.0)
    assert log.begun.index("b0") <= 2


def test_fair_threads_refuse_newest_of_largest_holder():
    log, gate = Log(), threading.Event()
    with closing(FairThreads(1, 4, "t")) as threads:
        threads.submit(log.task("a", 0, gate))
        wait_until(lambda: log.begun == ["a0"])
        for number in range(1, 8):
            threads.submit(log.task("a", number, gate))
        assert log.refused == ["a5", "a6", "a7"]
        for number in range(3):
            threads.submit(log.task("b", number, gate))
        assert log.refused[3:] == ["a4", "a3", "b2"]
        gate.set()
        for _ in range(5):
            assert log.ended.acquire(timeout=10.0)
    assert sorted(log.begun) == ["a0", "a1", "a2", "b0", "b1"]


async def test_call_is_refused_when_its_holder_has_most():
    gate = threading.Event()
    with closing(FairThreads(1, 2, "tests")) as threads:
        many = [asyncio.create_task(threads.call("many", gate.wait)) for _ in range(3)]
        await until(lambda: threads.num_waiting == 2)
        few = asyncio.create_task(threads.call("few", gate.wait))
        with pytest.raises(OverloadedError, match="too many requests wait for tests"):
            await many.pop()
        gate.set()
        assert await asyncio.gather(*many, few) == [True] * 3


async def test_cancelled_call_keeps_its_thread_until_it_ends():
    gate, begun = threading.Event(), []
    with closing(FairThreads(1, 100, "tests")) as threads:
        running = asyncio.create_task(threads.call("many", gate.wait))
        waiting = asyncio.create_task(threads.call("many", begun.append, "cancelled"))
        await until(lambda: threads.num_waiting == 1)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        after = asyncio.create_task(threads.call("few", begun.append, "few"))
        await until(lambda: threads.num_waiting == 2)
        gate.set()
        await after
        assert begun == ["few"]


async def test_call_runs_in_the_context_of_its_caller():
    with closing(FairThreads(1, 100, "tests")) as threads:
        ASKED.set("one")
        assert await threads.call("a", ASKED.get) == "one"
        with pytest.raises(ZeroDivisionError):
            await threads.call("a", divmod, 1, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
async def test_fair_threads_give_way_to_others_by_their_niceness():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with closing(FairThreads(1, 100, "tests", niceness=1)) as threads:
        assert await threads.call("a", os.getpriority, os.PRIO_PROCESS, 0) == min(own + 1, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
