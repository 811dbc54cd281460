"""Two routers over one Redis, each with half of the load: what they see, and who acts."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.errors import DeadlineExceededError
from baton.rpc.worker_role import Role
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.admission.forecast import Forecasts
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.cost_rates import Rates
from baton_router.routing.roles.pool_load import Objectives, PoolDemand
from baton_router.routing.roles.rebalancer import Rebalancer, _demand_in
from baton_router.routing.roles.role_balance import Hysteresis
from tests.support.waiting import until

RATES = Rates(prefill_seconds_per_token=1e-3)
OBJECTIVES = Objectives(ttft_ms=1000.0)
MARKS = Hysteresis(dwell_s=0.3, cooldown_s=5.0)
IDLE_GATE = cast(
    "AdmissionController",
    SimpleNamespace(num_waiting=0, num_waiting_tokens=0, num_waiting_encoder_tokens=0),
)
NOTHING_PLACED = cast("Forecasts", SimpleNamespace(num_in_flight=0, num_tokens_in_flight=0))


@dataclass
class World:
    """Workers whose roles change as soon as the rebalancer asks, or never."""

    roles: dict[str, Role] = field(
        default_factory=lambda: {"p0": "prefill", "d0": "decode", "d1": "decode"}
    )
    asked: list[tuple[str, Role, int]] = field(default_factory=list)
    never: bool = False

    async def set_role(self, worker: str, role: Role, epoch: int, _timeout: float) -> int:
        self.asked.append((worker, role, epoch))
        await asyncio.sleep(0.05)
        if self.never:
            raise DeadlineExceededError("what runs there does not end")
        self.roles[worker] = role
        return epoch + 1


class View:
    """The fleet as one router sees it, which has given the prefill worker so many tokens."""

    def __init__(self, world: World, num_queued_tokens: int) -> None:
        self._world = world
        self._num_queued_tokens = num_queued_tokens
        self.index = SimpleNamespace(num_hashes=lambda _worker: 0)

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(w, role, b"", num_queued_tokens=self._num_queued_tokens, rates=RATES)
            if w == "p0"
            else Candidate(w, role, b"", rates=RATES)
            for w, role in self._world.roles.items()
        ]

    def member(self, worker: str) -> Any:
        role = self._world.roles[worker]
        record = SimpleNamespace(id=worker, role=role, epoch=7, draining=False, keeps_role=False)
        return SimpleNamespace(record=record)


@asynccontextmanager
async def two_routers(
    world: World, num_tokens_each: int, *, is_elastic: bool = True
) -> AsyncIterator[list[Rebalancer]]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        routers = []
        for _ in range(2):
            redis = connect(server.url)
            stack.push_async_callback(redis.aclose)
            view: Any = View(world, num_tokens_each)
            router = Rebalancer(
                redis,
                view,
                IDLE_GATE,
                NOTHING_PLACED,
                OBJECTIVES,
                MARKS,
                is_elastic=is_elastic,
                poll_interval=0.05,
                gossip_interval=0.1,
            )
            router.changer = cast("Any", world)
            router.start()
            stack.push_async_callback(router.stop)
            routers.append(router)
        yield routers


async def test_rebalancers_sum_pressure_and_one_changes_role_once():
    world = World()
    async with two_routers(world, 600) as routers:
        await until(lambda: len(world.asked) > 0)
        await until(lambda: list(world.roles.values()).count("prefill") == 2)
        await until(
            lambda: all(r.balance.pressures["prefill"] == pytest.approx(0.6) for r in routers)
        )
        await asyncio.sleep(0.3)  # the other one looks at least once more
    assert world.asked == [("d0", "prefill", 7)]


async def test_rebalancer_does_not_retry_failed_change_at_once():
    world = World(never=True)
    async with two_routers(world, 600) as routers:
        await until(lambda: len(world.asked) > 0)
        await until(lambda: any("rest for" in r.balance.reason for r in routers))
        await asyncio.sleep(0.3)
        assert len(world.asked) == 1
        assert "p0" not in {worker for worker, _, _ in world.asked}


async def test_rebalancer_only_proposes_when_not_elastic():
    world = World()
    async with two_routers(world, 600, is_elastic=False) as routers:
        await until(lambda: all(r.balance.flip is not None for r in routers))
        assert {r.balance.flip.worker for r in routers if r.balance.flip} == {"d0"}
    assert world.asked == []


def test_demand_of_earlier_version_has_no_images():
    payload = json.dumps(["tiny", 1.5, 20, 3]).encode()
    assert _demand_in(payload, "tiny") == PoolDemand(1.5, 20, 3, 0.0)
    assert _demand_in(payload, "other") == PoolDemand()
