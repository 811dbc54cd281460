"""Device stream on a CPU that computes as late, or as early, as a GPU may.

Imports nothing but the standard library: `tests/support/deferred_site` installs it in every process
of a run of tests as it starts.
"""

import os
import sys
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from tests.support.changed_import import ChangedImport, is_changed


class _Deferred:
    """Work of a `DeferredStream`, as `Launch`."""

    def __init__(self, stream: "DeferredStream", work: Callable[[], Any]) -> None:
        self._stream = stream
        self._work: Callable[[], Any] | None = work
        self._value: Any = None

    @property
    def is_done(self) -> bool:
        return self._work is None

    @property
    def value(self) -> Any:
        assert self.is_done, "the host reads what the device has not computed"
        return self._value

    def wait(self) -> Any:
        while not self.is_done:
            self._stream.advance()
        return self._value

    def run(self) -> None:
        assert self._work is not None, "work is done once"
        work, self._work = self._work, None
        self._value = work()


class DeferredStream:
    """`DeviceStream` that runs launched work when the host waits for it, in the order of launches.

    Attributes:
        is_early: some devices are sometimes faster than they have to be; false while a test holds
            work, which would hold the host, too, that launches work behind it.
        num_launched, num_done: of the work so far.
    """

    is_asynchronous = True
    is_early = True

    def __init__(self, dice: Random | None = None) -> None:
        """With `dice`, the device is sometimes faster than it has to be."""
        self.num_launched = self.num_done = 0
        self._dice = dice
        self._queue: deque[_Deferred] = deque()
        self._is_running = False

    def launch(self, work: Callable[[], Any]) -> _Deferred:
        """Queues work, as `DeviceStream.launch`."""
        launch = _Deferred(self, work)
        self._queue.append(launch)
        self.num_launched += 1
        while self._queue and self._dice is not None and self._dice.random() < 0.3:
            if not DeferredStream.is_early:
                break
            self.advance()
        return launch

    def to_host(self, tensor: Any) -> Any:
        """Returns a copy that running work makes, as `DeviceStream.to_host`."""
        assert self._is_running, "a copy that is launched behind other work is late"
        return tensor.clone()

    def advance(self) -> None:
        """Does the oldest work that is left."""
        launch = self._queue.popleft()
        self._is_running = True
        try:
            launch.run()
        finally:
            self._is_running = False
            self.num_done += 1


VARIABLE = "BATON_DEFERRED"
"""Set by runs of tests that are worth nothing without the deferred device."""


def install() -> None:
    """Makes every engine of this process, and of those forked from it, compute on a deferred
    device. Raises `RuntimeError` if engines may have another one already."""
    modes = Modes()

    def change(module: Any) -> None:
        assert callable(module.stream_of), "engines take their stream from elsewhere"
        module.stream_of = lambda _device: modes.stream()

    ChangedImport(_MODULE, change).install()


def check_installed() -> None:
    """Raises `RuntimeError` if `VARIABLE` is set and this process has no deferred device."""
    if os.environ.get(VARIABLE) and not is_changed(_MODULE):
        raise RuntimeError(f"{VARIABLE} is set, but the deferred device is not installed")


_MODULE = "baton.engine.executor.device_stream"


class Modes:
    """Modes of the devices of engines: as late as possible, or sometimes faster.

    Engines are numbered: in one process one after the other, and a fork's from the number of forks
    before it. Of the numbers 2n and 2n + 1 one is late and one is faster, as the seed draws, so
    that both modes occur among three workers or engines in a row.
    """

    def __init__(self) -> None:
        self._seed = os.environ.get("BATON_TEST_SEED") or "0"
        self._first = int(os.environ.get("BATON_DEFERRED_FIRST") or 0)
        self._num_forks = self._num_engines = 0
        os.register_at_fork(after_in_parent=self._count_fork, after_in_child=self._become_fork)

    def _count_fork(self) -> None:
        self._num_forks += 1

    def _become_fork(self) -> None:
        self._first += self._num_forks
        self._num_forks = self._num_engines = 0

    def stream(self) -> DeferredStream:
        """Returns the stream of the next engine, and prints its mode and how to draw it again."""
        number = self._first + self._num_engines
        self._num_engines += 1
        is_late = Random(f"{self._seed} {number // 2}").random() < 0.5
        is_late ^= bool(number % 2)
        mode = "as late as possible" if is_late else "sometimes faster"
        again = f"BATON_TEST_SEED={self._seed} BATON_DEFERRED_FIRST={number}"
        print(f"deferred device: {mode}; as the first engine: {again}", file=sys.stderr, flush=True)
        return DeferredStream(None if is_late else Random(f"{self._seed} {number}"))
