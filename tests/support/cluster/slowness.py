"""Engines that compute slowly, so that no answer ends before its test has come to its point."""

import contextlib
import threading
from collections.abc import Iterator

import psutil

from baton.cli.local.local_cluster import LocalCluster

_RUNS_S = 0.001
_RESTS_S = 0.009


@contextlib.contextmanager
def slowed(cluster: LocalCluster, *names: str) -> Iterator[None]:
    """Engines of these workers compute for one of ten milliseconds for the length of the block, or
    to their end. A small model computes hundreds of tokens while a busy machine leaves a test
    without a core."""
    engines = [child for name in names for child in _engines_of(cluster, name)]
    is_over = threading.Event()

    def take_turns() -> None:
        while not is_over.wait(_RUNS_S):
            for engine in engines:
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.suspend()
            is_over.wait(_RESTS_S)
            for engine in engines:
                with contextlib.suppress(psutil.NoSuchProcess):
                    engine.resume()

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _engines_of(cluster: LocalCluster, name: str) -> list[psutil.Process]:
    children = psutil.Process(cluster.process(name).pid).children()
    assert children, f"the engine of {name} is no process of its own"
    return children
