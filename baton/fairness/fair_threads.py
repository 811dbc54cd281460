"""Threads whose tasks take turns by holder, so that none waits for all tasks of another."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.fairness.fair_queue import FairQueue


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
    """

    def __init__(self, num_threads: int, max_waiting: int, name: str) -> None:
        self._most_of_holder = max(1, num_threads - 1)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: FairQueue[Task] = FairQueue(quantum=1, max_waiting=max_waiting)
        self._num_running: Counter[str] = Counter()

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
