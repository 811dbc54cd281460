"""Refusals and usage by tenant: their labels, their log, and the calls of all APIs."""

import asyncio
import logging
from typing import Any

import httpx
import pytest

from baton.cluster.throttled_log import ThrottledLog
from baton.errors import OverloadedError
from baton_router.routing.admission.quotas import Quota, Quotas
from baton_router.telemetry.tenant_meter import TenantMeter
from tests.support.clock import Clock
from tests.support.router.front import routes_of, served_by
from tests.support.router.scripted import (
    answering,
    card,
    fleet_of,
)

FULL = OverloadedError("full", reason="queue")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_tenant_meter_labels_only_named_tenants():
    meter = TenantMeter(lambda: {"acme"})
    for tenant in ("acme", "globex", "initech", ""):
        meter.refused(tenant, "queue", FULL)
    assert meter.num_refused == {("acme", "queue"): 1, ("*", "queue"): 3}
    assert meter.labels == ["acme", "*"]


def test_first_refusal_of_a_minute_is_logged_with_number(caplog):
    clock = Clock(1000.0)
    log = ThrottledLog(logging.getLogger("refusals"), clock=lambda: clock.now)
    meter = TenantMeter(lambda: {"acme", "globex"}, log)
    for _ in range(5):
        meter.refused("acme", "queue", FULL)
    meter.refused("globex", "queue", FULL)
    meter.refused("acme", "deadline", FULL)
    clock.now += 60.0
    meter.refused("acme", "queue", FULL)
    assert [record.getMessage() for record in caplog.records] == [
        "a call of tenant 'acme' was refused (queue): full",
        "a call of tenant 'globex' was refused (queue): full",
        "a call of tenant 'acme' was refused (deadline): full",
        "a call of tenant 'acme' was refused (queue): full (and 4 more like this)",
    ]


@pytest.mark.parametrize(
    ("quota", "reason"),
    [
        (Quota(requests_per_minute=1), "requests_per_minute"),
        (Quota(bytes_per_minute=150), "bytes_per_minute"),
        (Quota(tokens_per_minute=10), "tokens_per_minute"),
    ],
    ids=["requests", "bytes", "tokens"],
)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_refusal_counts_in_request_metric_with_reason(quota, reason, is_stream):
    meter = TenantMeter()
    async with fleet_of(*answering()) as fleet:
        routes = routes_of({"tiny": fleet}, {"tiny": card()}, Quotas(default=quota), meter=meter)
        transport = httpx.ASGITransport(routes.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            bodies = [{**CHAT, "stream": is_stream}] * 3
            codes = [
                (await client.post("/v1/chat/completions", json=b)).status_code for b in bodies
            ]
        num_refused = codes.count(429)
        assert num_refused
        assert meter.num_refused == {("*", reason): num_refused}
        assert meter.num_requests["*"] == 3 - num_refused
        durations = served_by(routes).services.meter.duration.by_labels.items()
        counted = {labels[3]: sum(one.counts) for labels, one in durations}
        assert counted["RESOURCE_EXHAUSTED"] == num_refused
        assert sum(counted.values()) == 3


async def test_refusal_of_a_stream_that_began_is_counted():
    meter = TenantMeter()
    async with fleet_of(*answering()) as fleet:
        fleet.is_discovered = known = asyncio.Event()
        quotas = Quotas(default=Quota(tokens_per_minute=10))
        fleets, cards = {"tiny": fleet}, {"tiny": card()}
        app = routes_of(fleets, cards, quotas, meter=meter, max_silence=0.02).app()

        async def with_workers_once_it_began(scope: Any, receive: Any, send: Any) -> None:
            async def noted(message: Any) -> None:
                known.set()
                await send(message)

            await app(scope, receive, noted)

        transport = httpx.ASGITransport(with_workers_once_it_began)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            body = {**CHAT, "stream": True}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
            known.clear()
            answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, "rate_limit_exceeded" in answer.text) == (200, True)
    assert meter.num_refused == {("*", "tokens_per_minute"): 1}
