"""Answers as the OpenAPI document describes them: real ones have its fields and no others."""

import copy
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
from redis.asyncio import Redis

from baton.cluster.redis.client import connect
from baton.cluster.redis.embedded import EmbeddedRedis
from tests.support.router.front import front_of
from tests.support.router.written import NOW, OSLO, THOUGHT, writing

TEXT = f"{THOUGHT}I look.\n{OSLO}\n{NOW}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
FUNCTIONS = [{"name": name, "parameters": SCHEMA} for name in ("weather", "time")]
VERSION = {"anthropic-version": "2023-06-01"}

CHAT = {**USER, "tools": [{"type": "function", "function": f} for f in FUNCTIONS]}
RESPONSE = {
    "input": "hi",
    "max_output_tokens": 200,
    "tools": [
        {"type": "function", **FUNCTIONS[0]},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTIONS[1]}]},
        {"type": "function", **FUNCTIONS[1]},
    ],
}
MESSAGE = {**USER, "tools": [{"name": f["name"], "input_schema": SCHEMA} for f in FUNCTIONS]}
COMPLETION = {"prompt": "x", "max_tokens": 200, "logprobs": 2}
ASKED: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/v1/completions", COMPLETION, {}),
    ("POST", "/v1/completions", {**COMPLETION, "return_token_ids": True}, {}),
    ("POST", "/v1/completions", {"prompt": 3}, {}),
    ("POST", "/v1/chat/completions", CHAT, {}),
    ("POST", "/v1/chat/completions", {**USER, "logprobs": True, "return_token_ids": True}, {}),
    ("POST", "/v1/chat/completions", {**USER, "baton": {"timeline": True}}, {}),
    ("POST", "/v1/chat/completions", {"messages": 3}, {}),
    ("POST", "/v1/responses", RESPONSE, {}),
    ("POST", "/v1/responses", {"input": "hi", "text": {"verbosity": "low"}, "metadata": {}}, {}),
    ("POST", "/v1/responses", {}, {}),
    ("GET", "/v1/responses/{id}", None, {}),
    ("DELETE", "/v1/responses/{id}", None, {}),
    ("GET", "/v1/responses/{id}", None, {}),
    ("POST", "/v1/messages", MESSAGE, VERSION),
    ("POST", "/v1/messages", {**USER, "stop_sequences": ["look"]}, VERSION),
    ("POST", "/v1/messages", {"messages": 3}, VERSION),
    ("POST", "/v1/messages/count_tokens", {"messages": USER["messages"]}, VERSION),
    ("POST", "/v1/messages/count_tokens", {}, {}),
    ("GET", "/v1/models", None, {}),
    ("GET", "/v1/models", None, VERSION),
    ("GET", "/v1/models/{name}", None, {}),
    ("GET", "/v1/models/{name}", None, VERSION),
    ("GET", "/health", None, {}),
    ("GET", "/version", None, {}),
    ("POST", "/tokenize", {"prompt": "x", "return_token_strs": True}, {}),
    ("POST", "/tokenize", {}, {}),
    ("POST", "/detokenize", {"tokens": [5]}, {}),
]


@pytest.fixture
async def redis() -> AsyncIterator[Redis]:
    with EmbeddedRedis() as server:
        client = connect(server.url)
        yield client
        await client.aclose()


def closed(document: Any) -> Any:
    """The document, whose objects have no fields that it does not describe."""
    found = copy.deepcopy(document)
    for schema in found["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return found


def check(document: Any, method: str, path: str, answer: httpx.Response) -> None:
    """Checks an answer by the schema that the document has for it."""
    described = document["paths"][path][method.lower()]["responses"]
    kind = described["200" if answer.status_code == 200 else "default"]
    schema = kind["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


async def test_answers_are_as_the_document_describes_them(model, redis):
    workers = writing(TEXT, model=model)
    statuses = set()
    async with front_of(*workers, model=model, responses_ttl=60.0, redis=redis) as front:
        document = closed((await front.get("/openapi.json")).json())
        response_id = ""
        for method, path, body, headers in ASKED:
            url = path.format(id=response_id, name=model.name)
            answer = await front.request(method, url, json=body, headers=headers)
            statuses.add(answer.status_code)
            try:
                check(document, method, path, answer)
            except jsonschema.ValidationError as error:
                pytest.fail(f"{method} {path} {json.dumps(body)}: {error.message}")
            if path == "/v1/responses" and answer.status_code == 200:
                response_id = answer.json()["id"]
    assert statuses == {200, 400, 404}


async def test_document_describes_every_answer_in_json(model):
    async with front_of(*writing("a", model=model), model=model) as front:
        document = (await front.get("/openapi.json")).json()
    bare = {
        path
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if operation["responses"]["200"]["content"].get("application/json") == {}
    }
    assert bare == {"/openapi.json"}
