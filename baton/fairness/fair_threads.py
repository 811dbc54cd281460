"""Threads whose tasks take turns by holder, so that none waits for all tasks of another."""

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, TypeVarTuple

from baton.errors import OverloadedError
from baton.fairness.fair_queue import FairQueue

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Task of one holder.

    Attributes:
        refuse: called instead of `run` if the task does not wait any more: too many do.
    """

    holder: str
    run: Callable[[], None]
    refuse: Callable[[], None]


class FairThreads:
    """Threads that run the tasks of several holders in turns. Thread-safe.

    One of several threads is kept free of each holder: its tasks delay no other holder's first.

    Args:
        max_waiting: maximum number of tasks that wait; the newest of the holder with most give way.
        name: of the threads, and the reason for which `call` is refused.
        niceness: of the threads, added to that of the process, on Linux: where cores are short,
            other threads go first.
    """

    def __init__(self, num_threads: int, max_waiting: int, name: str, *, niceness: int = 0) -> None:
        self._name = name
        self._most_of_holder = max(1, num_threads - 1)
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix=name, initializer=partial(_add_niceness, niceness)
        )
        self._lock = threading.Lock()
        self._waiting: FairQueue[Task] = FairQueue(quantum=1, max_waiting=max_waiting)
        self._num_running: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Tasks that wait for a thread."""
        with self._lock:
            return len(self._waiting)

    async def call(
        self, holder: str, function: Callable[[*_Arguments], _Result], *arguments: *_Arguments
    ) -> _Result:
        """Calls the function in a thread and in the context of the caller, and returns or raises
        what it does. Raises `OverloadedError` if it gives way to others.

        A call that is cancelled is not made; one that runs keeps its thread until it ends.
        """
        called: Future[_Result] = Future()
        run = partial(copy_context().run, function, *arguments)
        self.submit(Task(holder, partial(_run, called, run), partial(self._refuse, called)))
        return await asyncio.wrap_future(called)

    def submit(self, task: Task) -> None:
        """Queues a task. Calls `refuse` of the one that gives way, which may be this one."""
        refused = self._push(task)
        if refused is not None:
            refused.refuse()
        if refused is not task:
            self._threads.submit(self._run)

    def close(self) -> None:
        """Ends the threads, once each has run the task that it has."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _push(self, task: Task) -> Task | None:
        with self._lock:
            victim = self._waiting.victim_for(task.holder)
            if victim == task.holder:
                return task
            refused = None if victim is None else self._waiting.pop_newest(victim).item
            self._waiting.push(task, tenant=task.holder, num_tokens=1)
            return refused

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task.run()
            finally:
                self._end(task.holder)

    def _next(self) -> Task | None:
        """Returns the next task; None if each that waits is of a holder with its threads."""
        with self._lock:
            waiting = self._waiting.pop(self._may_run)
            if waiting is None:
                return None
            self._num_running[waiting.tenant] += 1
            return waiting.item

    def _end(self, holder: str) -> None:
        with self._lock:
            self._num_running[holder] -= 1
            if not self._num_running[holder]:
                del self._num_running[holder]

    def _may_run(self, holder: str) -> bool:
        return self._num_running[holder] < self._most_of_holder

    def _refuse(self, called: "Future[_Result]") -> None:
        if called.set_running_or_notify_cancel():
            problem = f"too many requests wait for {self._name}, most of them of this tenant"
            called.set_exception(OverloadedError(f"{problem}. Retry later.", reason=self._name))


def _add_niceness(niceness: int) -> None:
    """Adds to the niceness of this thread, which has one of its own on Linux alone."""
    if niceness and sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def _run(called: "Future[_Result]", run: Callable[[], _Result]) -> None:
    if not called.set_running_or_notify_cancel():
        return
    try:
        called.set_result(run())
    except BaseException as error:
        called.set_exception(error)
