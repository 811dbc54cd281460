"""Worker process in any role: a model behind a gRPC server that answers while it loads.

Its role may change (`baton.worker.role_changes`); the model, the cache and the servers stay.

The server listens before the model is loaded, to report health and progress; the engine is
available once `engine` no longer raises.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import NoReturn, TypeVar, cast

from redis.asyncio import Redis

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.redis.address import with_password
from baton.cluster.redis.client import connect
from baton.cluster.redis.round_trips import RoundTrips
from baton.cluster.redis.signing import signing_keys
from baton.cluster.registry.registry import Registration, WorkerRecord, new_epoch
from baton.engine.client import EngineClient
from baton.engine.core.engine_core import EngineCore
from baton.engine.core.engine_thread import EngineThread
from baton.engine.core.process.engine_child import EngineChild
from baton.engine.core.process.engine_process import EngineProcess
from baton.engine.core.process.pool_memory import MemoryNotSharedError
from baton.engine.core.request_check import why_no_images
from baton.engine.engine import Engine
from baton.engine.scheduler.kv.block_pool import CacheEvents
from baton.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from baton.rpc.cancellation import run_until
from baton.rpc.worker_role import Role
from baton.serving.bounds import Bounds
from baton.serving.grpc.access import WORKER_NAME
from baton.serving.grpc.certificates import check_role
from baton.serving.grpc.channels import LARGE_FRAMES, Channels
from baton.serving.grpc.large_messages import LargeMessages
from baton.serving.grpc.large_requests import LargeRequests
from baton.serving.grpc.server import Server
from baton.serving.process import settle
from baton.serving.telemetry.exposition import Exposition
from baton.serving.telemetry.serving import serve_metrics
from baton.version import version
from baton.worker.layout_wire import serialize_layouts
from baton.worker.pairing import Pairing
from baton.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_Component = TypeVar("_Component")

# Seconds after which the channel to a worker closes that no blocks were fetched from.
_CHANNEL_IDLE_SECONDS = 600.0
# Of each field of a message that is large for its images: no prompt is longer.
_MAX_ELEMENTS = 2**20

# From the end of the engine's start until the worker takes requests.
_LAST_PHASE = "opening connections"


class Worker:
    """Worker process. Roles and components add services to `server` and `kv_server`, metrics to
    `exposition`, and callbacks; then `run` is called (`baton.worker.process`).

    Attributes:
        role: its present pool.
        why_keeps_role: reason why it cannot change its role, and the remedy; empty if it can.
        kv_server: server for blocks with a port and limits of its own, or `server`.
        epoch: number of the incarnation; grows with each start and each role change.
        channels: to other workers, for their blocks.
        exposition: its metrics.
        round_trips: counts of calls to Redis.
        is_loading: a thread loads the model, which nothing can interrupt.
    """

    def __init__(
        self, role: Role, settings: WorkerSettings, child: EngineChild | None = None
    ) -> None:
        """`child`: the process for the engine; None: a thread of this one. Raises
        `InvalidArgumentError` if the settings are for another role."""
        self.why_keeps_role = ""
        if check_role(settings.tls, (role, "worker"), WORKER_NAME) not in (None, "worker"):
            self.why_keeps_role = (
                f"its certificate is for {role} alone; one for worker may change its role"
            )
        if settings.engine_config().encoder_only:
            if role != "encode":
                raise InvalidArgumentError(
                    "encoder_only",
                    f"is set for a {role} worker, which runs the language model; expected an "
                    "encode worker",
                )
            self.why_keeps_role = (
                "it has loaded the encoder alone; start it without --encoder-only to change its "
                "role"
            )
        self.role = role
        self.settings = settings
        self._child = child
        # A message is larger than others may be for its images alone; the rest of it is bounded.
        self._large_requests = LargeRequests()
        bounds = Bounds(max_elements=_MAX_ELEMENTS, max_bytes=settings.max_encoder_input_bytes)
        self.server = Server(
            settings,
            large=LargeMessages(self._large_requests, bounds, settings.max_message_bytes),
            max_message_bytes=settings.max_message_bytes + settings.max_encoder_input_bytes,
        )
        self.kv_server = _kv_server(settings) or self.server
        self.channels = Channels(
            max(settings.max_message_bytes, settings.kv_max_message_bytes),
            tls=settings.tls_to_workers,
            options=LARGE_FRAMES,
            idle_seconds=_CHANNEL_IDLE_SECONDS,
        )
        self.epoch = new_epoch()
        self.phase = "starting"
        self.progress = 0.0
        self.num_loaded_bytes = 0
        self.num_weight_bytes = 0
        self.exposition = Exposition()
        self.round_trips = RoundTrips()
        self._engine: EngineClient | None = None
        self.is_loading = False
        self._is_loaded = False
        self._on_start: list[Callable[[], Awaitable[None]]] = []
        self._on_load: list[Callable[[AsyncExitStack], Awaitable[None]]] = []
        self._on_new_epoch: list[Callable[[], None]] = []
        self._components: dict[object, object] = {}
        self._load_reports: list[Callable[[], Mapping[str, int]]] = []
        self._metrics_endpoint = ""
        self._first_role = role
        self._is_shutting_down = False
        self._is_paused = False
        self._failed = asyncio.Event()
        self._failure = ""
        self._publisher: EventPublisher | None = None
        self._registration: Registration | None = None

    @property
    def id(self) -> str:
        """Name in the cluster, the same in every role. Valid once the server has started."""
        return self.settings.worker_id or f"{self._first_role}-{self.server.endpoint}"

    @property
    def is_ready(self) -> bool:
        """True once it takes requests, or would if it did not drain; never false again."""
        return self._is_loaded

    @property
    def is_draining(self) -> bool:
        """True if it takes no new work, for good or until it has changed its role."""
        return self._is_shutting_down or self._is_paused

    @property
    def is_shutting_down(self) -> bool:
        """True if it will never take new work again."""
        return self._is_shutting_down

    @property
    def redis_answers(self) -> bool:
        """True if routers would learn of another role now: Redis answers, or none is used."""
        return self._registration is None or not self._registration.stale

    @property
    def num_calls(self) -> int:
        """Calls in flight, except health, reflection and administration."""
        return sum(server.num_calls for server in self._servers)

    @property
    def idle_since(self) -> float | None:
        """Time since which no request holds anything here, in seconds since 1970; None while one
        does: blocks are the engine's, leases and promises end with their calls."""
        times = [self.engine.reading.idle_since, *(server.idle_since for server in self._servers)]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) else None

    @property
    def _servers(self) -> list[Server]:
        return list(dict.fromkeys((self.server, self.kv_server)))

    @property
    def engine(self) -> EngineClient:
        """The engine. Raises `UnavailableError` while the model is being loaded."""
        if self._engine is None:
            raise UnavailableError(f"worker {self.id} is not ready yet: {self.phase}")
        return self._engine

    def engine_for_new_work(self) -> EngineClient:
        """Returns the engine. Raises `UnavailableError` while loading or draining."""
        if self.is_draining:
            raise UnavailableError(f"worker {self.id} is draining; another one will serve this")
        return self.engine

    def engine_for(self, role: Role) -> EngineClient:
        """Returns the engine, for new work in `role`. Raises `UnavailableError` while loading or
        draining, and in another role."""
        engine = self.engine_for_new_work()
        if self.role != role:
            kept = f"in the {self.role} role for good: {self.why_keeps_role}"
            now = f"in the {self.role} role now; another one will serve this"
            raise UnavailableError(f"worker {self.id} is {kept if self.why_keeps_role else now}")
        return engine

    def check_serves(self, role: Role) -> None:
        """Raises `FailedPreconditionError` if the loaded model has nothing to do in `role`."""
        if role == "encode" and self.engine.encoder_pool is None:
            raise FailedPreconditionError(
                f"the encode role needs an encoder; {why_no_images(self.engine.facts.info)}"
            )

    def on_start(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Registers `callback`, awaited before the model is loaded. It raises what prevents the
        worker from serving."""
        self._on_start.append(callback)

    def on_load(self, callback: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
        """Registers `callback`, awaited once the engine runs and before the worker is registered.
        It sets up what needs the engine; closing the stack must undo it."""
        self._on_load.append(callback)

    def on_new_epoch(self, callback: Callable[[], None]) -> None:
        """Registers `callback`, called when an incarnation ends and one in another role begins."""
        self._on_new_epoch.append(callback)

    def component(self, kind: "Callable[[Worker], _Component]") -> _Component:
        """Returns this worker's `kind`, such as the KV exchange that all roles share.

        The first call makes it, before the worker runs.
        """
        if kind not in self._components:
            self._components[kind] = kind(self)
        return cast("_Component", self._components[kind])

    def on_load_report(self, report: Callable[[], Mapping[str, int]]) -> None:
        """Adds fields of `GetLoadResponse` by name, read whenever the load is asked for."""
        self._load_reports.append(report)

    def load_report(self) -> dict[str, int]:
        """Returns the load of all components, summed, as fields of `GetLoadResponse`."""
        total: Counter[str] = Counter()
        for report in self._load_reports:
            total.update(report())
        return total

    @property
    def staleness(self) -> dict[str, float]:
        """Seconds without an answer of Redis, by what it is asked for; empty without Redis."""
        if self._registration is None or self._publisher is None:
            return {}
        return {"registry": self._registration.staleness, "kv_events": self._publisher.staleness}

    @property
    def num_unpublished_events(self) -> int:
        """KV events that are not in Redis yet."""
        publisher = self._publisher
        return 0 if publisher is None else publisher.sequence - publisher.published

    def pairing(self) -> Pairing:
        """Returns the properties that another worker must share to exchange blocks with it."""
        engine = self.engine
        return Pairing(version(), engine.facts.info.fingerprint, engine.facts.layouts)

    async def drain(self) -> None:
        """Stops taking new work, for good."""
        if not self._is_shutting_down:
            self._is_shutting_down = True
            logger.info("draining: no new requests are accepted")
            if self._engine is not None:
                self._engine.resume()  # the requests that wait are to finish
            await self._publish_state()

    async def pause(self) -> None:
        """Stops taking new work until `resume` or `begin_epoch`."""
        self._is_paused = True
        await self._publish_state()

    async def resume(self) -> None:
        """Resumes taking new work after `pause`, unless it is leaving."""
        self._is_paused = False
        await self._publish_state()

    async def idle(self) -> None:
        """Waits until no call is in flight."""
        while self.num_calls:
            for server in self._servers:
                await server.wait_idle()

    async def begin_epoch(self, role: Role) -> None:
        """Takes work in `role` after `pause`, under a new epoch. No call may be in flight.

        Cached blocks stay, and are published again.
        """
        assert self._is_paused, "work may come meanwhile"
        assert self.num_calls == 0, "a call of the life before"
        for callback in self._on_new_epoch:
            callback()
        self.role, self.epoch = role, max(new_epoch(), self.epoch + 1)
        former = self._publisher
        if former is not None:
            self._publisher = former.successor(self.epoch)
            self._publisher.start()
        await self.resume()
        if former is not None:
            await former.stop()

    async def _publish_state(self) -> None:
        """Publishes readiness and role."""
        if self._registration is not None:
            self._registration.update(self._record())
        await self.server.set_ready(self.is_ready and not self.is_draining)

    async def run(self) -> None:
        """Serves until a signal, drains and stops. Raises what prevented it from serving."""
        async with AsyncExitStack() as stack:
            await self.listen(stack)
            self.server.on_drain(self.drain)
            await run_until(self.server.run_until_signal(), self._load_and_watch(stack))

    async def _load_and_watch(self, stack: AsyncExitStack) -> NoReturn:
        """Loads the model; raises `UnavailableError` once the engine has failed."""
        await self.load(stack)
        settle()
        await self._failed.wait()
        raise UnavailableError(f"the engine failed: {self._failure}")

    async def listen(self, stack: AsyncExitStack) -> None:
        """Starts the servers, which answer before there is a model. Closing `stack` stops them."""
        self._metrics_endpoint = await serve_metrics(
            self.settings, self.exposition, self.server, stack
        )
        for server in self._servers:
            await server.start()
            stack.push_async_callback(server.stop)
        stack.push_async_callback(self.channels.close)
        stack.callback(self._large_requests.close)

    async def load(self, stack: AsyncExitStack) -> None:
        """Loads the model, starts the engine, and registers the worker. The server has started.

        Closing `stack` undoes it.
        """
        for check in self._on_start:
            await check()
        url = self.settings.redis_url
        # A bad URL or file is reported before the model is loaded.
        password = self.settings.redis_password
        keys = signing_keys(self.settings.redis_signing_key_file)
        redis = connect(with_password(url, password), self.round_trips, keys) if url else None
        self.is_loading = True
        core = await asyncio.to_thread(self._load_core)
        engine = EngineClient(
            core,
            on_cache_events=self._on_cache_events,
            on_failure=self._on_engine_failure,
        )
        engine.start()
        stack.push_async_callback(engine.stop)
        self._engine = engine
        self.check_serves(self.role)
        for callback in self._on_load:
            await callback(stack)
        if redis is not None:
            await self._register(redis, stack)
        self._is_loaded = True
        await self._publish_state()
        logger.info("%s is ready at %s", self.id, self.server.endpoint)

    def _load_core(self) -> EngineCore:
        """Loads the model, in a thread; the child does, if there is one."""
        path, config = self.settings.model_path, self.settings.engine_config()
        on_progress, on_loaded = self._on_progress, self._on_loaded_bytes
        try:
            if self._child is not None:
                try:
                    return EngineProcess.load(self._child, path, config, on_progress, on_loaded)
                except MemoryNotSharedError as error:
                    if self.settings.engine_process == "yes":
                        raise
                    logger.warning("the engine steps in a thread: %s", error)
            return EngineThread(
                Engine.from_pretrained(
                    path, config, on_progress=on_progress, on_loaded_bytes=on_loaded
                )
            )
        finally:
            self.is_loading = False

    async def _register(self, redis: Redis, stack: AsyncExitStack) -> None:
        stack.push_async_callback(redis.aclose)
        self._publisher = EventPublisher(redis, self.id, self.epoch)
        self._registration = Registration(redis, self._record())
        self._publisher.start()
        self._registration.start()
        stack.push_async_callback(self._deregister)

    async def _deregister(self) -> None:
        assert self._registration is not None
        assert self._publisher is not None
        await self._registration.stop()
        await self._publisher.stop()

    def _record(self) -> WorkerRecord:
        engine = self.engine
        pool = engine.pools[0]  # the one that looks back furthest: it bounds a sequence
        return WorkerRecord(
            id=self.id,
            role=self.role,
            endpoint=self.server.endpoint,
            kv_endpoint=self.kv_server.endpoint,
            epoch=self.epoch,
            model=self.settings.model_name,
            fingerprint=engine.facts.info.fingerprint,
            layout=serialize_layouts(engine.facts.layouts),
            tokenizer_hash=engine.facts.info.namespace.tokenizer,
            kv_dtype=pool.layout.dtype,
            block_size=pool.layout.block_size,
            max_model_len=engine.facts.info.max_model_len,
            num_blocks=pool.num_blocks,
            draining=self.is_draining,
            max_num_batched_tokens=engine.facts.max_num_batched_tokens,
            metrics_endpoint=self._metrics_endpoint,
            admin_endpoint=self.server.admin_endpoint,
            version=version(),
            pooled_output=pooling.kind if (pooling := engine.facts.info.pooling) else "",
            keeps_role=bool(self.why_keeps_role),
        )

    def _on_progress(self, phase: str, fraction: float) -> None:
        self.phase = phase if fraction < 1.0 else _LAST_PHASE
        self.progress = fraction

    def _on_loaded_bytes(self, num_loaded: int, num_all: int) -> None:
        self.num_loaded_bytes, self.num_weight_bytes = num_loaded, num_all

    def _on_engine_failure(self, reason: str) -> None:
        self._failure = reason
        self._failed.set()

    def _on_cache_events(self, events: CacheEvents) -> None:
        if self._publisher is not None:
            self._publisher.publish(KvEvents(events.stored, events.removed, events.cleared))


def _kv_server(settings: WorkerSettings) -> Server | None:
    """Returns a server for blocks alone if `kv_port` is set; else None."""
    if settings.kv_port is None:
        return None
    apart = {"port": settings.kv_port, "max_message_bytes": settings.kv_max_message_bytes}
    return Server(settings.model_copy(update=apart))
