"""Device stream on a CPU that computes as late, or as early, as a GPU may.

Imports nothing but the standard library: `tests/support/deferred_site` installs it in every process
of a run of tests as it starts.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from random import Random
from types import ModuleType
from typing import Any


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
    """`DeviceStream` that runs launched work when somebody waits for it, in the order of launches.

    Attributes:
        num_launched, num_done: of the work so far.
    """

    is_asynchronous = True

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


def install() -> None:
    """Makes every engine of this process compute on a deferred device, which is drawn to be as
    slow as possible or sometimes faster."""
    sys.meta_path.insert(0, _Installer())


class _Installer(MetaPathFinder):
    """Finder of the module of streams, which it changes as it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "baton.engine.device_stream":
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        load, dice = spec.loader.exec_module, Random(os.environ.get("BATON_TEST_SEED", "0"))

        def exec_module(module: Any) -> None:
            load(module)
            module.stream_of = lambda _device: DeferredStream(dice if dice.random() < 0.5 else None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
