"""Host of one model: the process for its engine, loading, and the engine for its worker's role.

Independent of services and of Redis.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn

from baton.engine.client import EngineClient
from baton.engine.core.core_handle import CoreHandle
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.engine_thread import EngineThread
from baton.engine.core.process.engine_child import EngineChild, fork_engine
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.core.process.pool_memory import MemoryNotSharedError
from baton.engine.core.request_check import why_no_images
from baton.engine.executor.device import CUDA, Gpus
from baton.engine.watch import watch_engine
from baton.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from baton.rpc.worker_role import Role
from baton.worker.membership import Membership
from baton.worker.settings import KV_CONNECTORS, WorkerSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadProgress:
    """Progress of loading a model; `fraction` is in [0, 1]."""

    phase: str = "starting"
    fraction: float = 0.0
    num_loaded_bytes: int = 0
    num_weight_bytes: int = 0

    def enter(self, phase: str, fraction: float) -> None:
        # The last phase lasts until the worker takes requests.
        self.phase, self.fraction = phase if fraction < 1.0 else "opening connections", fraction

    def count(self, num_loaded: int, num_all: int) -> None:
        self.num_loaded_bytes, self.num_weight_bytes = num_loaded, num_all


class ModelHost:
    """Host of one model, whose engine steps in a child process or a thread of this one.

    Attributes:
        name: name under which the model is served.
        progress: progress of `load`.
        is_loading: a thread loads the model, which nothing can interrupt.
        on_start: awaited before the model is loaded; raises what prevents the worker from serving.
        on_load: awaited once the engine runs and before the worker joins its cluster. Sets up what
            needs the engine; closing the stack must undo it.
    """

    def __init__(
        self, settings: WorkerSettings, membership: Membership, child: EngineChild | None = None
    ) -> None:
        """`child`: the process for the engine; None: a thread of this one."""
        self.name = settings.model_name
        self.progress = LoadProgress()
        self.is_loading = False
        self.on_start: list[Callable[[], Awaitable[None]]] = []
        self.on_load: list[Callable[[AsyncExitStack], Awaitable[None]]] = []
        self._settings = settings
        self._membership = membership
        self._child = child
        self._engine: EngineClient | None = None
        self._failures: asyncio.Queue[str] = asyncio.Queue()

    @property
    def engine(self) -> EngineClient:
        """The engine. Raises `UnavailableError` while the model is being loaded."""
        if self._engine is None:
            name, phase = self._membership.id, self.progress.phase
            raise UnavailableError(f"worker {name} is not ready yet: {phase}")
        return self._engine

    def engine_for(self, role: Role | None) -> EngineClient:
        """Returns the engine, for new work in `role`; None: in any. Raises `UnavailableError` while
        loading or draining, and in another role."""
        member = self._membership
        if member.is_draining:
            raise UnavailableError(f"worker {member.id} is draining; another one will serve this")
        engine, why = self.engine, member.why_keeps_role
        if role not in (None, member.role):
            kept = f"for good: {why}" if why else "now; another one will serve this"
            raise UnavailableError(f"worker {member.id} is in the {member.role} role {kept}")
        return engine

    def check_serves(self, role: Role) -> None:
        """Raises `FailedPreconditionError` if the loaded model has nothing to do in `role`."""
        if role == "encode" and self.engine.encoder_pool is None:
            raise FailedPreconditionError(
                f"the encode role needs an encoder; {why_no_images(self.engine.facts.info)}"
            )

    async def load(self, stack: AsyncExitStack) -> None:
        """Loads the model and starts the engine. Closing `stack` undoes it."""
        for check in self.on_start:
            await check()
        self.is_loading = True
        handle = await asyncio.to_thread(self._load_core)
        member = self._membership
        engine = EngineClient(
            handle, on_cache_events=member.publish_events, on_failure=self._failures.put_nowait
        )
        engine.start()
        stack.push_async_callback(engine.stop)
        self._engine = engine
        watching = asyncio.create_task(watch_engine(engine, self._settings.engine_timeout_s))
        stack.callback(watching.cancel)
        member.on_drain.append(engine.resume)  # the requests that wait are to finish
        self.check_serves(member.role)
        for callback in self.on_load:
            await callback(stack)

    async def failure(self) -> NoReturn:
        """Raises `UnavailableError` once the engine has failed."""
        raise UnavailableError(f"the engine failed: {await self._failures.get()}")

    def _load_core(self) -> CoreHandle:
        """Loads the model, in a thread; the child does, if there is one."""
        path, config = self._settings.model_path, self._settings.engine_config()
        enter, count = self.progress.enter, self.progress.count
        try:
            if self._child is not None:
                try:
                    return EngineProcess.load(self._child, path, config, enter, count)
                except MemoryNotSharedError as error:
                    if self._settings.engine_process == "yes":
                        raise
                    logger.warning("the engine steps in a thread: %s", error)
            return EngineThread(
                EngineCore.from_pretrained(path, config, on_progress=enter, on_loaded_bytes=count)
            )
        finally:
            self.is_loading = False


def child_for(settings: WorkerSettings, gpus: Gpus = CUDA) -> EngineChild | None:
    """Forks a child for the engine if the settings and the device, which may be one of `gpus`, want
    one. Call before this process has other threads. Raises `InvalidArgumentError` where there
    cannot be one.

    Whether the server can open a GPU's memory of the child is found out as the engine is loaded.
    """
    if settings.engine_process == "no":
        return None
    problem = _problem(settings, gpus)
    if problem and settings.engine_process == "yes":
        raise InvalidArgumentError("engine_process", f"is yes, but {problem}; use auto or no")
    if problem:
        logger.info("the engine steps in a thread: %s", problem)
        return None
    return fork_engine()


def _problem(settings: WorkerSettings, gpus: Gpus) -> str:
    """Returns the reason why the engine cannot have a process of its own; empty if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    device = settings.engine_config().device
    # Not `is_available`, which initializes CUDA without NVML's help: no child could use it then.
    if not (device.startswith("cuda") or (device == "auto" and gpus.device_count() > 0)):
        return ""
    if settings.kv_connector not in KV_CONNECTORS:
        return (
            f"--kv-connector {settings.kv_connector} is of another package, which may register "
            "memory of a GPU in its own process alone"
        )
    if settings.may_use_nixl and find_spec("nixl"):
        return (
            "nixl, which is to move blocks, registers memory of a GPU in its own process alone "
            "(grpc and cuda-ipc do not need that: --kv-connector)"
        )
    return ""
