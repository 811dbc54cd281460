"""CPU pinning for a benchmark of a proxy: one core for the process under test, one for all else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_load_core() -> Iterator[None]:
    """Pins this thread, and the processes and threads that it starts in the block, to the core of
    the load: the client and the worker."""
    with _on(0):
        yield


@contextmanager
def on_tested_core() -> Iterator[None]:
    """Pins as `on_load_core`, to the core of the process under test. It is the same one where this
    process may run on one core alone."""
    with _on(-1):
        yield


@contextmanager
def _on(index: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(_ALLOWED)[index]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_ALLOWED = os.sched_getaffinity(0)  # before anything is pinned
