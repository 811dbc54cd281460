"""Routes of the HTTP front beside the generations, and what it says where there is none."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import ValidationError
from starlette.routing import Route

from baton.errors import InvalidArgumentError
from baton.version import version
from baton_router.apis.openai.schemas import ChatRequest, CompletionRequest
from baton_router.settings import RouterSettings
from tests.support.router.front import anthropic_client_of, front_of
from tests.support.router.scripted import Worker, card, decode, prefill

TEXT = "def main():\n    return '\u00e9'"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
async def front() -> AsyncIterator[httpx.AsyncClient]:
    async with front_of(prefill(), decode()) as client:
        yield client


async def document(front: httpx.AsyncClient) -> Any:
    return (await front.get("/openapi.json")).json()


# Tokens.


async def test_tokenize_returns_tokens_of_prompt(front):
    answer = await front.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})
    ids = card().encode(TEXT)
    assert answer.json() == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": 2048,
        "token_strs": [card().tokenizer.id_to_token(i) for i in ids],
    }


async def test_tokenize_leaves_out_special_tokens_if_told(front):
    asked = {"prompt": TEXT, "add_special_tokens": False, "model": "tiny"}
    answer = (await front.post("/tokenize", json=asked)).json()
    assert answer["tokens"] == card().encode_rendered(TEXT)
    assert answer["token_strs"] is None


async def test_tokenize_renders_messages_by_template(front):
    answer = await front.post("/tokenize", json={"messages": MESSAGES})
    assert answer.json()["tokens"] == card().encode_rendered(card().render(MESSAGES))


async def test_no_tokens_are_the_empty_text(front):
    assert (await front.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_stored_response_is_not_streamed(front):
    answer = await front.get("/v1/responses/resp_1", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_detokenize_undoes_tokenize(front):
    for text in (TEXT, "<|endoftext|> is special", "word " * 300):
        tokens = (await front.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert (await front.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": "x" * 2**21}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True},
            "messages",
        ),
        (
            "/tokenize",
            {
                "messages": MESSAGES,
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "add_generation_prompt",
        ),
        ("/detokenize", {"tokens": [1, 4000]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_token_routes_refuse_wrong_field_by_name(front, path, asked, param):
    answer = await front.post(path, json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_token_routes_refuse_other_models(front):
    for path, asked in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        answer = await front.post(path, json={**asked, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_version_is_that_of_the_package(front):
    assert (await front.get("/version")).json() == {"version": version()}


async def test_ping_is_health(front):
    ping, health = await front.get("/ping"), await front.get("/health")
    assert (ping.status_code, ping.json()) == (health.status_code, health.json())


# Ids of requests.


@pytest.mark.symptom(
    "imp#1561, vllm#9593",
    there="errors have no id of their request",
    here="Sends `x-request-id` and `request-id` with every answer.",
)
@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/none", None),
        ("DELETE", "/v1/completions", None),
        ("POST", "/tokenize", {}),
        ("POST", "/v1/chat/completions", {"messages": 3}),
        ("POST", "/v1/messages", {"messages": 3}),
        ("POST", "/v1/embeddings", {"input": "x"}),
    ],
)
async def test_every_answer_has_an_id_under_both_names(front, method, path, asked):
    answers = [await front.request(method, path, json=asked) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids == [answer.headers["request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert all(len(request_id) == 16 for request_id in ids)


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_failed_answer_has_the_id_of_its_request(path):
    refusal = InvalidArgumentError("sampling.grammar", "is not understood")
    workers = [Worker(role, role, [refusal]) for role in ("prefill", "decode")]
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 2}
    if path == "responses":
        asked = {"input": "hi", "max_output_tokens": 2}
    async with front_of(*workers) as front:
        answer = await front.post(f"/v1/{path}", json=asked)
    assert answer.status_code == 400
    # Each attempt adds a suffix of its own.
    ids = {
        request.request_id.partition(".")[0] for worker in workers for request in worker.requests
    }
    assert {answer.headers["request-id"]} == ids


# Models.


async def test_models_are_listed_also_behind_a_slash(front):
    listed, behind = await front.get("/v1/models"), await front.get("/v1/models/")
    assert behind.json() == listed.json()
    assert listed.json()["object"] == "list"
    assert "display_name" not in listed.json()["data"][0]


async def test_models_have_what_the_client_of_anthropic_reads(front):
    client = anthropic_client_of(front)
    listed = await client.models.list()
    found = await client.models.retrieve("tiny")
    for model in (found, *listed.data):
        given = model.model_dump()
        assert type(model).model_validate(given) == model
        assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
        assert model.created_at.tzinfo is not None
    assert (listed.first_id, listed.last_id, listed.has_more) == ("tiny", "tiny", False)
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("none")
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert caught.value.request_id


# Cross-origin requests.


async def test_front_allows_no_origin_by_default(front):
    preflight = await front.options("/v1/completions", headers=PREFLIGHT)
    answer = await front.get("/health", headers={"origin": ORIGIN})
    assert preflight.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_front_answers_preflight_of_allowed_origin_everywhere():
    async with front_of(prefill(), decode(), origins=f"{ORIGIN},http://localhost:3000") as front:
        for path in (await document(front))["paths"]:
            answer = await front.options(path, headers=PREFLIGHT)
            assert answer.status_code == 200, path
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert answer.headers["access-control-allow-credentials"] == "true"
            assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
        foreign = await front.options("/", headers={**PREFLIGHT, "origin": "https://evil.example"})
        assert foreign.status_code == 400
        assert "access-control-allow-origin" not in foreign.headers


async def test_errors_can_be_read_by_allowed_origin():
    async with front_of(prefill(), decode(), origins=ORIGIN) as front:
        answer = await front.post(
            "/v1/completions", json={"flavour": 1}, headers={"origin": ORIGIN}
        )
    assert answer.status_code == 400
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    exposed = answer.headers["access-control-expose-headers"]
    assert {"x-baton-ignored", "x-request-id", "retry-after"} <= {*exposed.split(", ")}


async def test_any_origin_is_allowed_without_credentials():
    async with front_of(prefill(), decode(), origins="*") as front:
        answer = await front.get("/health", headers={"origin": ORIGIN, "cookie": "a=b"})
        preflight = await front.options("/v1/completions", headers=PREFLIGHT)
    for response in (answer, preflight):
        assert "access-control-allow-credentials" not in response.headers
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    "origins",
    ["", "chat.example.org", "https://a.example/path", "https://*.example", "*,https://a", "null"],
)
def test_setting_refuses_what_is_no_origin(origins):
    with pytest.raises(ValidationError, match="http_allowed_origins"):
        RouterSettings(http_allowed_origins=origins)


# What exists.


async def test_openapi_document_is_valid(front):
    OpenAPIV31SpecValidator(await document(front)).validate()


async def test_openapi_document_has_every_route(front):
    transport: Any = front._transport
    routes = {
        (method, route.path.replace(":path", ""))
        for route in transport.app.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    paths = (await document(front))["paths"]
    assert {(m.upper(), path) for path in paths for m in paths[path]} == routes


async def test_openapi_document_has_every_field(front):
    found = await document(front)
    for path, schema in (
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatRequest),
    ):
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rpartition("/")[2]
        properties = found["components"]["schemas"][name]["properties"]
        assert properties.keys() == {*schema.__struct_encode_fields__}


async def test_front_lists_routes_for_unknown_one(front):
    answer = await front.get("/v1/foo")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert error["message"].startswith("no route /v1/foo; this server has POST /v1/completions, ")
    for path, operations in (await document(front))["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}" in error["message"]


@pytest.mark.parametrize("word", ["responses/compact", "responses/resp_1/cancel", "models/x/y"])
async def test_front_lists_routes_for_unknown_one_below_another(front, word):
    answer = await front.post(f"/v1/{word}", json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert error["message"].startswith(f"no route /v1/{word}; this server has POST /v1/completions")


async def test_error_of_unknown_route_is_bounded(front):
    answer = await front.get("/" + "x" * 5000)
    assert len(answer.json()["error"]["message"]) < 1000


async def test_front_names_methods_of_a_route(front):
    answer = await front.delete("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    message = answer.json()["error"]["message"]
    assert message == "DELETE is not served at /v1/completions; use POST"
