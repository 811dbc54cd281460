"""Fleets of two models over a real Redis, and workers that only say whether they serve."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from baton.errors import NotFoundError
from baton.serving.grpc.channels import Channels
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton_router.routing.fleet.fleets import Fleets
from baton_router.routing.fleet.service_discovery import ServiceDiscovery
from tests.router.routing.fleet.test_fleet import record_of, registered
from tests.support.router.records import TOKENIZER
from tests.support.waiting import until


@asynccontextmanager
async def two_fleets() -> AsyncIterator[tuple[Server, Fleets, EmbeddedRedis]]:
    """A worker that is ready, and the fleets of the models a and b, of one tokenizer."""
    server = Server(ServingSettings())
    await server.start()
    await server.set_ready(True)
    with EmbeddedRedis() as redis_server:
        redis, channels = connect(redis_server.url), Channels()
        tokenizer_hashes = {"a": TOKENIZER, "b": TOKENIZER}
        fleets = Fleets(redis, channels, tokenizer_hashes, 1000, 8, poll_interval=0.05)
        fleets.start()
        try:
            await until(lambda: fleets.is_redis_up, within=5.0)
            yield server, fleets, redis_server
        finally:
            await fleets.stop()
            await channels.close()
            await redis.aclose()
            await server.stop(0.0)


def listed(fleets: Fleets) -> dict[str, list[str]]:
    """The candidates of each model that can take a request."""
    return {
        model: [one.worker for one in fleet.candidates() if not one.excluded]
        for model, fleet in fleets.of.items()
    }


async def test_fleets_have_only_workers_of_their_model():
    async with two_fleets() as (server, fleets, redis):
        one = record_of(server, id="w1", model="a", metrics_endpoint="127.0.0.1:9")
        other = replace(one, id="w2", model="b")
        stranger = replace(one, id="w3", model="c")
        async with registered(redis, one), registered(redis, other), registered(redis, stranger):
            await until(lambda: listed(fleets) == {"a": ["w1"], "b": ["w2"]}, within=5.0)
            await until(lambda: "w3" in fleets.refused_records, within=5.0)
            assert fleets.refused_records == {
                "w3": "it serves the model 'c'; expected one of 'a', 'b'"
            }
            assert [(model, m.record.id) for model, m in fleets.members] == [
                ("a", "w1"),
                ("b", "w2"),
            ]
            assert fleets.model_of("w2") == "b"
            with pytest.raises(NotFoundError):
                fleets.model_of("w3")
            told, _ = ServiceDiscovery(fleets, "127.0.0.1:1").render()
            assert told.count(b'"__meta_baton_model": "b"') == 1


async def test_worker_that_changes_its_model_moves_at_once():
    async with two_fleets() as (server, fleets, redis):
        record = record_of(server, id="w", model="a")
        async with registered(redis, record) as registration:
            await until(lambda: listed(fleets) == {"a": ["w"], "b": []}, within=5.0)
            registration.update(replace(record, model="b", epoch=record.epoch + 1))
            await until(lambda: listed(fleets) == {"a": [], "b": ["w"]}, within=5.0)
            assert fleets.of["a"].members == []


async def test_redis_outage_keeps_the_workers_of_all_models():
    async with two_fleets() as (server, fleets, redis):
        one = record_of(server, id="w1", model="a")
        other = replace(one, id="w2", model="b")
        async with registered(redis, one), registered(redis, other):
            await until(lambda: listed(fleets) == {"a": ["w1"], "b": ["w2"]}, within=5.0)
            redis.stop()
            await until(lambda: not fleets.is_redis_up, within=5.0)
            assert listed(fleets) == {"a": ["w1"], "b": ["w2"]}
            assert fleets.staleness.keys() == {"registry", "kv_events"}
