"""Models of one router in this process, over scripted workers."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from baton_router.apis.routes import Routes
from baton_router.routing.admission.quotas import Quota, Quotas
from baton_router.routing.admission.readiness import Readiness, RouterReadiness
from baton_router.served.served_models import ModelNotFoundError
from tests.support.router.api_types import Checked
from tests.support.router.front import NO_LIMITS, routes_of
from tests.support.router.scripted import (
    answering,
    card,
    fleet_of,
)

ASKED = {"prompt": "def", "max_tokens": 2}
CHECKPOINTS = {"org/b": "b", "a": "b", "plain": "a"}
ALIASES = {"plain": {"b": 1.0}, "canary": {"a": 50.0, "b": 50.0}}


@asynccontextmanager
async def router(limits: Quota = NO_LIMITS) -> AsyncIterator[tuple[Routes, httpx.AsyncClient]]:
    """A router of the models a and b, and a client of its HTTP."""
    cards = {name: replace(card(), name=name) for name in ("a", "b")}
    async with AsyncExitStack() as stack:
        fleets = {name: await stack.enter_async_context(fleet_of(*answering())) for name in cards}
        routes = routes_of(
            fleets, cards, Quotas(default=limits), aliases=ALIASES, checkpoints=CHECKPOINTS
        )
        transport = httpx.ASGITransport(Checked(routes.app()))
        client = httpx.AsyncClient(transport=transport, base_url="http://router")
        yield routes, await stack.enter_async_context(client)


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ({}, "a"),
        ({"model": "a"}, "a"),
        ({"model": "plain"}, "b"),
        ({"model": "org/b"}, "b"),
        ({"model": "org/b/"}, "b"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_names_the_model_that_gave_it(asked, answers, stream):
    async with router() as (_, client):
        response = await client.post("/v1/completions", json={**ASKED, **asked, "stream": stream})
    assert response.status_code == 200, response.text
    assert f'"model":"{answers}"' in response.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_unknown_model_over_http_is_not_found_with_list(path):
    body = {"model": "gpt-5", **ASKED}
    if "chat" in path:
        body = {"model": "gpt-5", "messages": [{"role": "user", "content": "a"}]}
    async with router() as (routes, client):
        response = await client.post(path, json=body)
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "model is 'gpt-5'; expected one of 'a', 'b', 'plain', 'canary'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert routes._models.num_not_found == 1


async def test_unknown_model_counts_against_the_rate_limit():
    async with router(replace(NO_LIMITS, requests_per_minute=2)) as (_, client):
        asked = [
            await client.post("/v1/completions", json={**ASKED, "model": "c"}) for _ in range(3)
        ]
    assert [response.status_code for response in asked] == [404, 404, 429]


async def test_models_over_http_are_listed_and_shown_one_by_one():
    async with router() as (_, client):
        listed = (await client.get("/v1/models")).json()["data"]
        shown = [(await client.get(f"/v1/models/{one['id']}")).json() for one in listed]
        missing = await client.get("/v1/models/gpt-5")
        of_checkpoint = await client.get("/v1/models/org/b")
    assert [one["id"] for one in listed] == ["a", "b", "canary", "plain"]
    assert shown == listed
    assert listed[2]["alias_of"] == {"a": 50.0, "b": 50.0}
    assert of_checkpoint.json() == listed[1]
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_models_are_found_by_name_alias_and_id():
    async with router() as (routes, _):
        models = routes._models
        assert [models.of(name).name for name in ("", "a", "b", "plain")] == ["a", "a", "b", "b"]
        drawn = {models.of("canary", f"r{number}").name for number in range(20)}
        assert drawn == {"a", "b"}
        assert models.of("canary").name == "a"
        assert [models.of(name).name for name in ("org/b", "org/b//")] == ["b", "b"]
        with pytest.raises(ModelNotFoundError) as caught:
            models.of("模" * 5000)
        assert len(str(caught.value)) < 300
        assert "expected one of 'a', 'b'" in str(caught.value)


async def test_prompts_of_one_request_go_to_one_model():
    async with router() as (routes, client):
        for number in range(1, 9):
            asked = {**ASKED, "prompt": ["x", "y", "z"], "model": "canary"}
            response = await client.post("/v1/completions", json=asked)
            assert response.status_code == 200
            calls = [len(served.services.fleet.workers[0].requests) for served in routes._models]
            assert sum(calls) == 3 * number
            assert calls[0] % 3 == 0


def test_router_is_ready_while_one_model_is():
    missing = {"a": "no decode worker is known", "b": "no prefill worker is known"}
    now = 0.0
    of = {
        name: Readiness(lambda _, name=name: missing[name], clock=lambda: now, hold_seconds=1.0)
        for name in missing
    }
    readiness = RouterReadiness(of)

    def reason() -> str:
        for one in of.values():
            one.update()
        return readiness.reason

    assert reason() == "a: no decode worker is known; b: no prefill worker is known"
    missing["b"] = ""
    assert reason() == ""
    missing["b"] = missing["a"]
    now = 2.0
    assert reason() == missing["a"]
