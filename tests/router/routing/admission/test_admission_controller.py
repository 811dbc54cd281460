"""Waiting in fair order for room, within a deadline and an allowance; refusals say until when."""

import asyncio
import math
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import pytest

from baton.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    OverloadedError,
)
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.tenant import Tenant
from baton_router.call.request import ANONYMOUS, Request, RequestOutcome
from baton_router.call.usage import Account, Timings
from baton_router.lifecycle.in_flight import Requests
from baton_router.routing.admission.admission_queue import AdmissionQueue, Forecast
from baton_router.routing.admission.controller import AdmissionController
from baton_router.routing.admission.quotas import Quota, Quotas
from baton_router.routing.placement.decision import Decision, PlacementInputs, Rules
from tests.support.waiting import until


def request(
    name: str = "r", num_tokens: int = 10, priority: int = 0, tenant: Tenant = ANONYMOUS
) -> Request:
    return Request(name, (1,) * num_tokens, SamplingParams(), priority, tenant=tenant)


@dataclass
class Cluster:
    """Room for so many requests, which take it when they are placed and give it back."""

    room: int
    drain_seconds: float = 0.0
    ttft_seconds: float = 0.01
    admission_controller: AdmissionController = field(init=False)
    order: list[str] = field(default_factory=list)
    most: int = 0
    num_running: int = 0
    learned: list[tuple[int, float | None]] = field(default_factory=list)
    quotas: Quotas = field(default_factory=Quotas)
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        self.admission_controller = AdmissionController(self.quotas, self, self.max_waiting)

    def begin(self, _request: Request, _forecast: Forecast) -> None:
        self.num_running += 1
        self.most = max(self.most, self.num_running)

    def end(self, _request: Request, num_output_tokens: int, first_token_at: float | None) -> None:
        self.num_running -= 1
        self.learned.append((num_output_tokens, first_token_at))

    def forecast(
        self, request: Request, _num_tokens_ahead: int, earlier: Decision | None
    ) -> Forecast:
        has_room = self.num_running < self.room
        drain_seconds = 0.0 if has_room else self.drain_seconds
        decision = earlier or Decision(Rules(), PlacementInputs(request.request_id, 1, ()), None)
        return Forecast(has_room, self.ttft_seconds, drain_seconds, decision)

    async def run(
        self,
        name: str,
        until: asyncio.Event | None = None,
        *,
        tenant: str = "",
        seconds: float = 5.0,
        num_output_tokens: int = 0,
        **of_request: int,
    ) -> None:
        asked = request(name, tenant=Tenant(tenant), **of_request)
        account = Account(Timings(0.0), len(asked.token_ids), num_output_tokens)
        await self.admission_controller.admit(asked, tenant, Deadline.after(seconds))
        try:
            self.order.append(name)
            await (until.wait() if until else asyncio.sleep(0.001))
        finally:
            self.admission_controller.end(RequestOutcome(asked, account))


async def test_admission_admits_at_once_when_there_is_room():
    cluster = Cluster(room=8)
    await asyncio.gather(*(cluster.run(str(i)) for i in range(8)))
    assert cluster.most == 8
    assert cluster.admission_controller.num_waiting == 0


async def test_admission_counts_room_of_concurrent_requests():
    cluster = Cluster(room=3)
    await asyncio.gather(*(cluster.run(str(i)) for i in range(20)))
    assert cluster.most == 3
    assert cluster.order == [str(i) for i in range(20)]


async def test_admission_is_fair_between_large_and_small_tenants():
    cluster, full = Cluster(room=1), asyncio.Event()
    tasks = [asyncio.create_task(cluster.run("first", full, tenant="many", num_tokens=1000))]
    await until(lambda: cluster.num_running == 1, within=2.0)
    tasks += [
        asyncio.create_task(cluster.run(f"m{i}", tenant="many", num_tokens=1000)) for i in range(10)
    ]
    await until(lambda: cluster.admission_controller.num_waiting == 10, within=2.0)
    tasks.append(asyncio.create_task(cluster.run("one", tenant="few", num_tokens=1000)))
    await until(lambda: cluster.admission_controller.num_waiting == 11, within=2.0)
    assert cluster.admission_controller.num_waiting_tokens == 11_000
    full.set()
    await asyncio.gather(*tasks)
    assert cluster.order.index("one") <= 3


async def test_admission_counts_images_of_queued_requests():
    controller = (cluster := Cluster(room=0)).admission_controller
    images = tuple(EncoderInput(bytes(16), start, 5) for start in (0, 10))
    asked = replace(request(num_tokens=20), encoder_inputs=images)
    waiting = asyncio.create_task(controller.admit(asked, "t", Deadline.after(10.0)))
    await until(lambda: cluster.admission_controller.num_waiting == 1, within=2.0)
    assert controller.num_waiting_encoder_tokens == 10
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert controller.num_waiting_encoder_tokens == 0


async def test_admission_serves_smaller_priorities_first():
    cluster, full = Cluster(room=1), asyncio.Event()
    tasks = [asyncio.create_task(cluster.run("first", full))]
    await until(lambda: cluster.num_running == 1, within=2.0)
    for name, priority in (("late", 2), ("soon", -1), ("usual", 0)):
        tasks.append(asyncio.create_task(cluster.run(name, priority=priority)))
    await until(lambda: cluster.admission_controller.num_waiting == 3, within=2.0)
    full.set()
    await asyncio.gather(*tasks)
    assert cluster.order == ["first", "soon", "usual", "late"]


async def test_admission_rejects_missed_deadline_with_drain_time():
    cluster = Cluster(room=0, drain_seconds=7.0)
    with pytest.raises(
        OverloadedError, match=r"in 7\.0 s, and the deadline is in 1\.0 s"
    ) as refused:
        await cluster.run("r", seconds=1.0)
    assert refused.value.retry_after == 7.0
    assert cluster.admission_controller.num_waiting == 0


async def test_admission_queues_request_until_its_deadline_passes():
    cluster = Cluster(room=0, ttft_seconds=0.0)
    with pytest.raises(DeadlineExceededError, match="waited for room"):
        await cluster.run("r", seconds=0.05)
    assert cluster.admission_controller.num_waiting == 0


async def test_admission_rejects_queued_request_that_would_be_late():
    cluster, full = Cluster(room=1, ttft_seconds=30.0), asyncio.Event()
    tasks = [asyncio.create_task(cluster.run("first", full, seconds=60.0))]
    await until(lambda: cluster.num_running == 1, within=2.0)
    with pytest.raises(OverloadedError, match=r"in 30\.0 s, and the deadline is in (29|30)\.\d s"):
        await cluster.run("late", seconds=30.2)
    assert cluster.admission_controller.num_waiting == 0
    full.set()
    await asyncio.gather(*tasks)
    assert cluster.order == ["first"]


async def test_admission_finds_room_without_notification():
    cluster = Cluster(room=0)
    task = asyncio.create_task(cluster.run("r"))
    await until(lambda: cluster.admission_controller.num_waiting == 1, within=2.0)
    cluster.room = 1
    await task


async def test_admission_rejects_when_queue_is_full():
    cluster, full = Cluster(room=1, max_waiting=2), asyncio.Event()
    tasks = [asyncio.create_task(cluster.run(str(i), full)) for i in range(3)]
    await until(lambda: cluster.admission_controller.num_waiting == 2, within=2.0)
    with pytest.raises(OverloadedError, match="2 requests wait") as refused:
        await cluster.run("r")
    assert refused.value.retry_after > 0
    full.set()
    await asyncio.gather(*tasks)


async def test_admission_forgets_request_cancelled_in_queue():
    cluster, full = Cluster(room=1), asyncio.Event()
    first = asyncio.create_task(cluster.run("first", full))
    await until(lambda: cluster.num_running == 1, within=2.0)
    leaver = asyncio.create_task(cluster.run("leaver"))
    last = asyncio.create_task(cluster.run("last"))
    await until(lambda: cluster.admission_controller.num_waiting == 2, within=2.0)
    leaver.cancel()
    full.set()  # at the same moment, so that its turn may be on its way
    await asyncio.gather(first, leaver, last, return_exceptions=True)
    assert cluster.order == ["first", "last"]
    assert cluster.admission_controller.num_waiting == 0


async def test_admission_returns_quota_when_cancelled_at_admission():
    quotas = Quotas(default=Quota(max_concurrent=1))
    cluster = Cluster(room=1, quotas=quotas)
    leaver = asyncio.create_task(cluster.run("leaver"))
    await asyncio.sleep(0)  # its turn was given, and it has not run on yet
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await cluster.run("next", seconds=1.0)
    assert cluster.order[-1] == "next"


async def test_admission_queues_tenant_over_its_concurrency_quota():
    quotas = Quotas({"few": Quota(max_concurrent=2)})
    cluster, full = Cluster(room=10, quotas=quotas), asyncio.Event()
    async with AsyncExitStack() as stack:
        stack.callback(full.set)
        tasks = [asyncio.create_task(cluster.run(f"f{i}", full, tenant="few")) for i in range(4)]
        await until(lambda: cluster.admission_controller.num_waiting == 2, within=2.0)
        await cluster.run("other", tenant="other")
        assert cluster.order == ["f0", "f1", "other"]
    await asyncio.gather(*tasks)
    assert cluster.order == ["f0", "f1", "other", "f2", "f3"]


async def test_admission_rejects_tenant_over_rate_with_retry_after():
    moment = 0.0
    quotas = Quotas({"slow": Quota(tokens_per_second=10.0)}, clock=lambda: moment)
    cluster = Cluster(room=10, quotas=quotas)
    await cluster.run("r0", tenant="slow", num_tokens=50, num_output_tokens=250)
    with pytest.raises(OverloadedError, match="'slow' is over its rate") as refused:
        await cluster.run("r1", tenant="slow", seconds=5.0)
    assert refused.value.retry_after == pytest.approx(20.0), "100 saved, 300 taken, 10 a second"
    await cluster.run("other", tenant="fast")
    moment = 20.5
    await cluster.run("r2", tenant="slow")
    assert cluster.order == ["r0", "other", "r2"]


async def test_admission_charges_no_tokens_the_client_resumed_with():
    quotas = Quotas({"slow": Quota(tokens_per_second=100.0)}, clock=lambda: 0.0)
    cluster, asked = Cluster(room=1, quotas=quotas), request(tenant=Tenant("slow"))
    await cluster.admission_controller.admit(asked, "slow", Deadline.after(5.0))
    quotas.enter("slow", 1000)
    before = quotas.seconds_until_available("slow")
    account = Account(
        Timings(0.0, first_token=1.0), 10, num_output_tokens=900, num_received_tokens=900
    )
    cluster.admission_controller.end(RequestOutcome(asked, account))
    assert quotas.seconds_until_available("slow") == before > 0.0
    assert cluster.learned == [(0, None)]


async def test_admission_has_room_again_when_request_is_cancelled():
    cluster = Cluster(room=1, quotas=Quotas(default=Quota(max_concurrent=1)))
    first = asyncio.create_task(cluster.run("first", asyncio.Event()))
    await until(lambda: cluster.num_running == 1, within=2.0)
    first.cancel()
    await cluster.run("next")


async def test_admission_returns_decision_made_at_arrival():
    cluster, full, asked = Cluster(room=1), asyncio.Event(), request("second")
    first = asyncio.create_task(cluster.run("first", full))
    await until(lambda: cluster.num_running == 1, within=2.0)
    second = asyncio.create_task(cluster.admission_controller.admit(asked, "", Deadline.after(5.0)))
    await until(lambda: cluster.admission_controller.num_waiting == 1, within=2.0)
    full.set()
    await first
    decision = await second
    assert decision is not None
    assert decision.inputs.request_id == "second"


async def test_admission_raises_abort_of_queued_request():
    cluster, full = Cluster(room=1), asyncio.Event()
    first = asyncio.create_task(cluster.run("first", full))
    await until(lambda: cluster.num_running == 1, within=2.0)
    asked = request("second")

    async def wait() -> None:
        await cluster.admission_controller.admit(asked, "", Deadline.after(5.0))
        raise AssertionError("it was admitted")

    second = asyncio.create_task(wait())
    await until(lambda: cluster.admission_controller.num_waiting == 1, within=2.0)
    cluster.admission_controller.abandon(asked, CancelledError("the request was aborted"))
    cluster.admission_controller.abandon(asked, CancelledError("and again"))
    cluster.admission_controller.abandon(request("unknown"), CancelledError("unknown"))
    with pytest.raises(CancelledError, match="the request was aborted"):
        await second
    full.set()
    await first
    assert cluster.admission_controller.num_waiting == 0


async def test_paused_admission_holds_requests_until_resume_or_drain():
    for ends in ("resume", "drain"):
        cluster = Cluster(room=1)
        requests = Requests([cluster.admission_controller])
        requests.pause()
        waiting = asyncio.create_task(cluster.run("waits"))
        with pytest.raises(DeadlineExceededError, match=r"admission .* is paused.*baton resume"):
            await cluster.run("late", seconds=0.1)
        assert (cluster.order, requests.num_waiting, requests.is_paused) == ([], 1, True)
        if ends == "drain":
            await requests.begin_drain()
            with pytest.raises(FailedPreconditionError, match="draining"):
                requests.pause()
        else:
            requests.resume()
        await waiting
        assert (cluster.order, requests.is_paused) == (["waits"], False)


async def test_full_queue_displaces_newest_of_largest_tenant():
    cluster, full = Cluster(room=1, max_waiting=10), asyncio.Event()
    tasks = [asyncio.create_task(cluster.run("first", full, tenant="many"))]
    await until(lambda: cluster.num_running == 1, within=2.0)
    many = [asyncio.create_task(cluster.run(f"m{i}", tenant="many")) for i in range(26)]
    await until(lambda: cluster.admission_controller.num_waiting == 10, within=2.0)
    few = [asyncio.create_task(cluster.run(f"f{i}", tenant="few")) for i in range(7)]
    await until(lambda: sum(task.done() for task in (*many, *few)) == 16 + 7, within=2.0)
    assert cluster.admission_controller.num_waiting == 10
    full.set()
    outcomes = await asyncio.gather(*tasks, *many, *few, return_exceptions=True)
    assert cluster.order[0] == "first"
    assert {*cluster.order[1:]} == {f"{tenant}{i}" for tenant in "mf" for i in range(5)}
    refused = [each for each in outcomes if each is not None]
    assert {type(each) for each in refused} == {OverloadedError}
    assert all(each.retry_after > 0 for each in refused)
    assert {each.reason for each in refused} == {"queue"}
    displaced = [str(each) for each in refused if "gives way" in str(each)]
    assert len(displaced) == 5
    assert "10 requests wait" in displaced[0]
    assert "tenant 'many'" in displaced[0]


async def test_paused_queue_displaces_at_once():
    cluster = Cluster(room=1, max_waiting=2)
    cluster.admission_controller.pause()
    many = [asyncio.create_task(cluster.run(f"m{i}", tenant="many")) for i in range(2)]
    await until(lambda: cluster.admission_controller.num_waiting == 2, within=2.0)
    few = asyncio.create_task(cluster.run("few", tenant="few"))
    with pytest.raises(OverloadedError, match="gives way"):
        await many[1]
    cluster.admission_controller.resume()
    await asyncio.gather(many[0], few)
    assert sorted(cluster.order) == ["few", "m0"]


class Steady:
    """A forecaster of a thousand tokens a second, which has no room now."""

    def forecast(self, _request: str, num_tokens_ahead: int, _: Decision | None) -> Forecast:
        return Forecast(False, 0.1, num_tokens_ahead / 1000)


def test_long_queue_of_one_tenant_makes_no_other_late():
    queue = AdmissionQueue(Quotas(), Steady(), on_displaced=lambda *_: None)
    for number in range(100):
        queue.join(f"m{number}", tenant="many", priority=0, num_tokens=1000, seconds_left=math.inf)
    with pytest.raises(OverloadedError, match=r"in 100\.1 s, and the deadline is in 10\.0 s"):
        queue.join("late", tenant="many", priority=0, num_tokens=1000, seconds_left=10.0)
    assert queue.join("few", tenant="few", priority=0, num_tokens=1000, seconds_left=10.0)
