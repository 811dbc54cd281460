"""Membership of a worker in its cluster: id, role, epoch, and whether it takes new work.

With Redis, its record and its KV events are published. Independent of the model.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.events.publisher import EventPublisher
from baton.cluster.redis.round_trips import RoundTrips
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord, new_epoch
from baton.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError
from baton.rpc.worker_role import Role
from baton.serving.grpc.access import WORKER_NAME
from baton.serving.grpc.certificates import check_role
from baton.worker.server import WorkerServer
from baton.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)


class Membership:
    """Membership of one worker.

    Attributes:
        role: its present pool.
        why_keeps_role: reason why it cannot change its role, and the remedy; empty if it can.
        epoch: number of the incarnation; grows with each start and each role change.
        is_ready: it takes requests, or would if it did not drain; never false again.
        is_shutting_down: it will never take new work again.
        round_trips: counts of calls to Redis.
        on_drain: called when it stops taking new work for good.
        on_new_epoch: called when an incarnation ends and one in another role begins.
    """

    def __init__(self, role: Role, settings: WorkerSettings, server: WorkerServer) -> None:
        """Raises `InvalidArgumentError` if the settings are for another role or their URL of Redis
        is not one, `FailedPreconditionError` if a certificate or the signing keys are no good."""
        self.role = self._first_role = role
        self.why_keeps_role = _why_keeps_role(role, settings)
        self.epoch = new_epoch()
        self.is_ready = False
        self.is_shutting_down = False
        self.round_trips = RoundTrips()
        self.on_drain: list[Callable[[], None]] = []
        self.on_new_epoch: list[Callable[[], None]] = []
        self._is_paused = False
        self._settings = settings
        self._server = server
        self._redis = settings.redis.connect(self.round_trips)
        self._publisher: EventPublisher | None = None
        self._registration: Registration | None = None

    @property
    def id(self) -> str:
        """Name in the cluster, the same in every role. Valid once the server has started."""
        return self._settings.worker_id or f"{self._first_role}-{self._server.main.endpoint}"

    @property
    def is_draining(self) -> bool:
        """True if it takes no new work, for good or until it has changed its role."""
        return self.is_shutting_down or self._is_paused

    @property
    def redis_answers(self) -> bool:
        """True if routers would learn of another role now: Redis answers, or none is used."""
        return self._registration is None or not self._registration.stale

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

    def check_epoch(self, epoch: int) -> None:
        """Raises `FailedPreconditionError` unless a request is for the present incarnation."""
        if epoch != self.epoch:
            raise FailedPreconditionError(
                f"this worker's epoch is {self.epoch}, the request's is {epoch}: it has restarted "
                "or changed its role since"
            )

    def publish_events(self, events: KvEvents) -> None:
        """Publishes changes of the prefix cache, if Redis is used."""
        if self._publisher is not None:
            self._publisher.publish(events)

    async def join(self, record: WorkerRecord, stack: AsyncExitStack) -> None:
        """Begins to take work. With Redis, registers `record`, which is of this role and epoch, and
        publishes KV events; closing `stack` ends both."""
        if self._redis is not None:
            stack.push_async_callback(self._redis.aclose)
            self._publisher = EventPublisher(self._redis, self.id, self.epoch)
            self._registration = Registration(self._redis, record)
            self._publisher.start()
            self._registration.start()
            stack.push_async_callback(self._leave)
        self.is_ready = True
        await self._publish_state()

    async def drain(self) -> None:
        """Stops taking new work, for good."""
        if not self.is_shutting_down:
            self.is_shutting_down = True
            logger.info("draining: no new requests are accepted")
            for callback in self.on_drain:
                callback()
            await self._publish_state()

    async def pause(self) -> None:
        """Stops taking new work until `begin_epoch`, and waits until no call is in flight. Raises
        `DeadlineExceededError` after `drain_timeout_s`, and takes work again."""
        self._is_paused = True
        await self._publish_state()
        timeout = self._settings.drain_timeout_s
        try:
            async with asyncio.timeout(timeout):
                await self._server.wait_idle()
        except TimeoutError:
            self._is_paused = False
            await self._publish_state()
            raise DeadlineExceededError(
                f"{self._server.num_calls} calls did not end within drain_timeout_s = {timeout:g}; "
                f"the worker stays in the {self.role} role"
            ) from None

    async def begin_epoch(self, role: Role) -> None:
        """Takes work in `role` after `pause`, under a new epoch, unless it drains. Cached blocks
        stay, and are published again."""
        assert self._is_paused, "work may come meanwhile"
        assert self._server.num_calls == 0, "a call of the life before"
        for callback in self.on_new_epoch:
            callback()
        self.role, self.epoch = role, max(new_epoch(), self.epoch + 1)
        former = self._publisher
        if former is not None:
            self._publisher = former.successor(self.epoch)
            self._publisher.start()
        self._is_paused = False
        await self._publish_state()
        if former is not None:
            await former.stop()

    async def _publish_state(self) -> None:
        """Publishes readiness and role."""
        if self._registration is not None:
            record = self._registration.record
            self._registration.update(
                replace(record, role=self.role, epoch=self.epoch, draining=self.is_draining)
            )
        await self._server.main.set_ready(self.is_ready and not self.is_draining)

    async def _leave(self) -> None:
        assert self._registration is not None
        assert self._publisher is not None
        await self._registration.stop()
        await self._publisher.stop()


def _why_keeps_role(role: Role, settings: WorkerSettings) -> str:
    certified = check_role(settings.tls, (role, "worker"), WORKER_NAME)
    if settings.engine_config().encoder_only:
        if role != "encode":
            raise InvalidArgumentError(
                "encoder_only",
                f"is set for a {role} worker, which runs the language model; expected an encode "
                "worker",
            )
        return "it has loaded the encoder alone; start it without --encoder-only to change its role"
    if certified not in (None, "worker"):
        return f"its certificate is for {role} alone; one for worker may change its role"
    return ""
