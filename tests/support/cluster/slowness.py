"""Engines that compute slowly, so that no answer ends before its test has come to its point."""

import contextlib
import threading
from collections.abc import Iterator

import psutil

from baton.cli.local.local_cluster import LocalCluster

_RUNS_S = 0.003
_RESTS_S = 0.012


@contextlib.contextmanager
def slowed(cluster: LocalCluster, *names: str) -> Iterator[None]:
    """Engines of these workers compute for a fifth of the time, until the block or the first of
    them ends. A small model computes hundreds of tokens while a busy machine leaves a test without
    a core."""
    engines = [child for name in names for child in _engines_of(cluster, name)]
    is_over = threading.Event()

    def take_turns() -> None:
        while all(map(psutil.Process.is_running, engines)) and not is_over.wait(_RUNS_S):
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
