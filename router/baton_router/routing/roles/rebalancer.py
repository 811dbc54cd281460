"""Rebalancer: polls the load of all pools, proposes role changes and, if elastic, makes them."""

import asyncio
import json
import logging
import secrets
import time
from dataclasses import astuple

from redis.asyncio import Redis

from baton.cluster.gossip import INTERVAL, Gossip
from baton.cluster.keys import role_lock_key
from baton.cluster.redis.client import prefix_of
from baton.cluster.redis.lock import RedisLock
from baton.errors import BatonError
from baton.rpc.worker_role import ROLES
from baton.serving.deadline import Clock
from baton_router.call.request import Request
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.admission.forecast import Forecasts
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.roles.pool_load import (
    Backlog,
    Objectives,
    PoolDemand,
    demand_of,
    pressures_of,
)
from baton_router.routing.roles.role_balance import (
    Balance,
    Flip,
    Hysteresis,
    RoleBalance,
    WorkerState,
)
from baton_router.routing.roles.role_changer import RoleChanger

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# Timeout of a role change, in seconds, which includes draining the worker.
_FLIP_SECONDS = 120.0
_MAX_DEMAND = 1e12  # requests, tokens or seconds of one router


class Rebalancer:
    """Rebalancer of one model of a router. The routers of a cluster gossip their demand, so that
    each knows the total, and a distributed lock lets only one of them change a role at a time.

    Args:
        model: name of the model, by which the demand of others is told apart.
        is_elastic: whether it makes the role changes that it proposes.
        takes_images: whether the model takes images, so that workers may have the encode role.
        poll_interval: seconds between two observations.
        gossip_interval: seconds between two payloads of gossip.

    Attributes:
        balance: last observation and proposal.
    """

    def __init__(
        self,
        redis: Redis,
        fleet: Fleet,
        admission_controller: AdmissionController,
        forecasts: Forecasts[Request],
        objectives: Objectives,
        limits: Hysteresis,
        *,
        is_elastic: bool,
        takes_images: bool = False,
        model: str = "",
        clock: Clock = time.monotonic,
        poll_interval: float = _POLL_SECONDS,
        gossip_interval: float = INTERVAL,
    ) -> None:
        name = secrets.token_hex(8)
        self.changer = RoleChanger(fleet, takes_images=takes_images)
        self.is_elastic = is_elastic
        self._model = model
        self._fleet = fleet
        self._admission = admission_controller
        self._forecasts = forecasts
        self._objectives = objectives
        self._cooldown_seconds = limits.cooldown_s
        self._clock = clock
        self._poll_interval = poll_interval
        self._roles = RoleBalance(limits)
        self._gossip = Gossip(redis, name, self._gossip_payload, interval=gossip_interval)
        self._role_change_lock = RedisLock(redis, role_lock_key(prefix_of(redis)), name)
        self._poll_task: asyncio.Task[None] | None = None
        self._flipping: asyncio.Task[None] | None = None
        self.balance = Balance(dict.fromkeys(ROLES, 0.0), None, "nothing was seen yet")

    def start(self) -> None:
        """Starts polling in the background. Needs a running event loop."""
        self._gossip.start()
        self._poll_task = asyncio.create_task(self._poll_forever())

    async def stop(self) -> None:
        """Stops polling. A worker that is changing its role continues with it."""
        await self._gossip.stop()
        tasks = [task for task in (self._poll_task, self._flipping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def poll(self) -> Balance:
        """Observes all pools once and returns the proposal, also kept as `balance`."""
        workers = self._fleet.candidates()
        demand = self._demand(workers)
        for payload in self._gossip.others:
            demand += _demand_in(payload, self._model)
        before = self.balance
        self.balance = self._roles.observe(
            [self._state_of(worker) for worker in workers],
            pressures_of(workers, demand, self._objectives),
            self._clock(),
        )
        flip = self.balance.flip
        if flip is not None and before.flip is None:
            logger.info("%s should change to the %s role: %s", *_named(flip), self.balance.reason)
        return self.balance

    async def _poll_forever(self) -> None:
        while True:
            try:
                self._act(self.poll().flip)
            except Exception:
                logger.exception("the balance of roles could not be computed")
            await asyncio.sleep(self._poll_interval)

    def _act(self, flip: Flip | None) -> None:
        if self.is_elastic and flip is not None and not self._is_flipping:
            self._flipping = asyncio.create_task(self._flip(flip))

    @property
    def _is_flipping(self) -> bool:
        return self._flipping is not None and not self._flipping.done()

    async def _flip(self, flip: Flip) -> None:
        """Changes the role of a worker, unless another router holds the lock."""
        if not await self._role_change_lock.acquire(_FLIP_SECONDS + self._cooldown_seconds):
            return
        try:
            await self.changer.set_role(flip.worker, flip.role, flip.epoch, _FLIP_SECONDS)
            logger.info("%s changed to the %s role", *_named(flip))
        except BatonError as error:
            logger.warning("%s did not change to the %s role: %s", *_named(flip), error)
        self._roles.begin_cooldown(self._clock())
        await self._role_change_lock.acquire(self._cooldown_seconds)

    def _state_of(self, worker: Candidate) -> WorkerState:
        record = self._fleet.member(worker.worker).record
        return WorkerState(
            worker=record.id,
            role=record.role,
            epoch=record.epoch,
            pairing=worker.pairing,
            is_ready=not worker.excluded,
            is_draining=record.draining,
            keeps_role=record.keeps_role,
            num_sequences=worker.num_sequences,
            num_indexed_hashes=self._fleet.index.num_hashes(record.id),
        )

    def _demand(self, workers: list[Candidate]) -> PoolDemand:
        """Returns the demand from this router alone."""
        admission_controller, forecasts = self._admission, self._forecasts
        backlog = Backlog(
            admission_controller.num_waiting,
            admission_controller.num_waiting_tokens,
            forecasts.num_in_flight,
            forecasts.num_tokens_in_flight,
            admission_controller.num_waiting_encoder_tokens,
        )
        return demand_of(workers, backlog)

    def _gossip_payload(self) -> bytes:
        demand = self._demand(self._fleet.candidates())
        return json.dumps([self._model, *astuple(demand)]).encode()


def _demand_in(payload: bytes, model: str) -> PoolDemand:
    """Returns the demand for a model in a gossip payload; zero if it is of another model, or has
    another format."""
    try:
        of, *demand = json.loads(payload)
        if of != model:
            return PoolDemand()
        numbers = list(map(float, demand))
        if not all(0 <= number <= _MAX_DEMAND for number in numbers):
            return PoolDemand()
        return PoolDemand(*numbers)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return PoolDemand()


def _named(flip: Flip) -> tuple[str, str]:
    return flip.worker, flip.role
