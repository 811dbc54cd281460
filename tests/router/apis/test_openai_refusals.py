"""Refusals of OpenAI requests before any worker is called, by the name of the field."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.router.front import front_of, openai_client_of
from tests.support.router.scripted import card, decode, prefill

JSON = {"content-type": "application/json"}
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def front() -> AsyncIterator[httpx.AsyncClient]:
    """A router whose workers must not be asked."""
    workers = prefill(), decode()
    async with front_of(*workers) as client:
        yield client
    assert not any(worker.requests for worker in workers)


async def post(
    client: httpx.AsyncClient, path: str, content: Any, **headers: str
) -> httpx.Response:
    return await client.post(path, content=content, headers={**JSON, **headers})


# Bounds of sampling parameters are tests/test_sampling_params.py's.
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "a number as text": ({"temperature": "hot"}, "temperature"),
    "a number out of bounds": ({"top_p": 1.5}, "top_p"),
    "not a whole number": ({"max_tokens": 2.5}, "max_tokens"),
    "a number out of bounds, streamed": ({"top_p": 1.5, "stream": True}, "top_p"),
    "no token": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "two bounds": ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    "tops without log-probabilities": ({"top_logprobs": 2}, "top_logprobs"),
    "an empty stop": ({"stop": ["a", ""]}, "stop[1]"),
    "a bias of no token": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "a bias beyond the vocabulary": ({"logit_bias": {"4000": 1}}, "logit_bias"),
    "several without randomness": ({"n": 2, "temperature": 0}, "n"),
    "too many": ({"n": 17}, "n"),
    "a role that nothing knows": (
        {"messages": [*MESSAGES, {"role": "asistant", "content": "x"}]},
        "messages[1].role",
    ),
    "no role": ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "a sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
    ),
    "an image without a URL": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].image_url",
    ),
    "half a character": (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "messages[0].content",
    ),
    "a format without a name": (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
    ),
    "a format that is none": ({"response_format": {"type": "yaml"}}, "response_format.type"),
    "a tool that must be called": ({"tool_choice": "required"}, "tool_choice"),
    "a budget for thinking": ({"thinking_token_budget": 5}, "thinking_token_budget"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities[1]"),
    "functions": ({"functions": [{"name": "f"}]}, "functions"),
    "an audio answer": ({"audio": {"voice": "alloy"}}, "audio"),
    "scores of a prompt in a stream": ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "two priorities": ({"priority": 1, "baton": {"priority": 2}}, "priority"),
    "beams that are drawn": (
        {"use_beam_search": True, "n": 2, "temperature": 0.5},
        "use_beam_search",
    ),
    "too many beams": ({"use_beam_search": True, "n": 17}, "n"),
    "an empty bad word": ({"bad_words": [""]}, "bad_words[0]"),
    "an earlier call of a function": (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    "usage without a stream": (
        {"stream": False, "stream_options": {"include_usage": True}},
        "stream_options",
    ),
    "a template of the client's": (
        {"chat_template_kwargs": {"chat_template": "x"}},
        "chat_template_kwargs.chat_template",
    ),
}


@pytest.mark.symptom(
    "litellm#29431",
    there="`stream_options` comes without a stream",
    here="Refuses it by name, as OpenAI does.",
)
@pytest.mark.parametrize(("fields", "param"), BAD_CHATS.values(), ids=BAD_CHATS)
async def test_front_refuses_bad_chat_by_name_of_field(front, fields, param):
    asked = {"model": "tiny", "messages": MESSAGES, **fields}
    response = await post(front, "/v1/chat/completions", json.dumps(asked))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ")
    assert "sampling." not in error["message"]


@pytest.mark.parametrize("wrong", [{"4000": 1, "5000": 1}, {"x": 1, "y": 1}])
async def test_front_names_every_wrong_key_of_a_bias(front, wrong):
    asked = {"model": "tiny", "messages": MESSAGES, "logit_bias": {"5": 1, **wrong}}
    response = await post(front, "/v1/chat/completions", json.dumps(asked))
    assert response.status_code == 400
    assert all(key in response.json()["error"]["message"] for key in wrong)


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty text": ({"prompt": ""}, "prompt"),
    "an empty list": ({"prompt": []}, "prompt"),
    "an empty one of several": ({"prompt": ["a", ""]}, "prompt"),
    "one of several too long": ({"prompt": ["a", "word " * 100_000]}, "prompt"),
    "mixed": ({"prompt": ["a", 3]}, "prompt[1]"),
    "a negative token": ({"prompt": [3, -1]}, "prompt[1]"),
    "a token of 33 bits": ({"prompt": [[3], [4, 2**32]]}, "prompt[1][1]"),
    "a token beyond the vocabulary": ({"prompt": [3, 4000]}, "prompt[1]"),
    "too many prompts": ({"prompt": ["a"] * 129}, "prompt"),
    "too many log-probabilities": ({"logprobs": 21}, "logprobs"),
    "negative log-probabilities": ({"logprobs": -1, "echo": True}, "logprobs"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "fewer of which the best": ({"best_of": 1, "n": 2}, "best_of"),
    "a suffix": ({"suffix": "end"}, "suffix"),
}


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS)
async def test_front_refuses_bad_completion_by_name_of_field(front, fields, param):
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}
    response = await post(front, "/v1/completions", json.dumps(asked))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error


BAD_BODIES = {
    "nothing": b"",
    "half an object": b'{"model": "tiny"',
    "a list": b"[]",
    "no text": b'{"model": "\xff"}',
    "not a number": b'{"temperature": NaN}',
    "too deep": b'{"messages":' + b"[" * 100_000,
    "a number of a million digits": b'{"seed": ' + b"9" * 1_000_000 + b"}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
async def test_front_refuses_body_that_is_no_object(front, body):
    response = await post(front, "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")


async def test_front_refuses_body_that_is_not_said_to_be_json(front):
    response = await post(front, "/v1/completions", b"{}", **{"content-type": "text/plain"})
    assert response.status_code == 415


async def test_front_refuses_compressed_body_by_encoding(front):
    response = await post(front, "/v1/completions", b"{}", **{"content-encoding": "gzip"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (415, "unsupported_media_type")
    assert "'gzip'; expected none" in error["message"]
    plain = await post(front, "/v1/completions", b"{}", **{"content-encoding": "identity"})
    assert plain.status_code == 400, "the prompt is missing"


async def test_front_names_unknown_routes_and_methods(front):
    missing, wrong = await front.get("/v2"), await front.get("/v1/completions")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


async def test_errors_map_to_exceptions_of_the_openai_client(front):
    async with openai_client_of(front) as ai:
        with pytest.raises(openai.NotFoundError) as caught:
            await ai.completions.create(model="gpt-5", prompt="x")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            await ai.chat.completions.create(model="gpt-5", messages=MESSAGES, stream=True)
        with pytest.raises(openai.BadRequestError) as refused:
            await ai.completions.create(model="tiny", prompt="x", temperature=-1)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as refused:
            await ai.embeddings.create(model="tiny", input="x")
        assert (refused.value.code, refused.value.param) == ("unsupported_output", "model")
        with pytest.raises(openai.NotFoundError):
            await ai.moderations.create(model="tiny", input="x")
        assert refused.value.request_id


async def test_front_refuses_prompt_over_limit(front):
    async with openai_client_of(front) as ai:
        with pytest.raises(openai.BadRequestError, match="at most 1048576 bytes") as caught:
            await ai.completions.create(model="tiny", prompt="x" * 2**21)
    assert caught.value.param == "prompt"


LONG = "word " * 3000
NUM_LONG = len(card().encode(LONG))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]}
NUM_CHAT = len(card().encode_rendered(card().render(CHAT["messages"])))
TOO_LONG: dict[str, tuple[str, dict[str, Any], int]] = {
    "text": ("completions", {"prompt": LONG}, NUM_LONG),
    "one of several": ("completions", {"prompt": ["a", LONG]}, NUM_LONG),
    "token ids": ("completions", {"prompt": [5] * 2048}, 2048),
    "chat": ("chat/completions", CHAT, NUM_CHAT),
}


async def test_front_names_every_bias_of_no_token(front):
    response = await post(
        front,
        "/v1/completions",
        json.dumps({"prompt": "a", "logit_bias": {"x": 1, "7": 1, "y": 1}}),
    )
    message = response.json()["error"]["message"]
    assert message == "logit_bias: has keys that are no token ids: 'x', 'y'"


@pytest.mark.symptom(
    "opencode#17762, opencode#17748",
    there="clients do not know the code of a prompt that is too long",
    here="Answers 400 with `context_length_exceeded` and the true number of tokens.",
)
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}], ids=["unset", "5"])
@pytest.mark.parametrize(("path", "asked", "num_tokens"), TOO_LONG.values(), ids=TOO_LONG)
async def test_front_blames_prompt_that_is_too_long_alone(front, path, asked, num_tokens, fields):
    response = await post(front, f"/v1/{path}", json.dumps({**asked, **fields}))
    error = response.json()["error"]
    field = "messages" if "messages" in asked else "prompt"
    assert (response.status_code, error["param"]) == (400, field)
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 2048 tokens" in error["message"]
    assert f"has {num_tokens} tokens" in error["message"]
    assert "max_tokens" not in error["message"]


async def test_front_blames_prompt_of_responses_that_is_too_long(front):
    response = await post(front, "/v1/responses", json.dumps({"input": LONG}))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "input")
    assert error["code"] == "context_length_exceeded"
    assert f"has {NUM_CHAT} tokens; this model's maximum context length is 2048" in error["message"]


@pytest.mark.symptom(
    "pi#5930",
    there="the text of that error matches no pattern of a client",
    here="Says it in OpenAI's words, and in Anthropic's on `/v1/messages`.",
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_front_blames_long_prompt_of_messages_as_anthropic(front, is_streamed):
    body = {**CHAT, "max_tokens": 32_000, "stream": is_streamed}
    response = await post(front, "/v1/messages", json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == f"prompt is too long: {NUM_CHAT} tokens > 2048 maximum"


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_front_tells_prompt_of_many_bytes_as_too_long(front, path):
    text, most = "a b " * 2**19, 2**20
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 9}
    asked: dict[str, Any] = {"completions": {"prompt": text}, "responses": {"input": text}}
    response = await post(front, f"/v1/{path}", json.dumps(asked.get(path, chat)))
    error = response.json()["error"]
    assert response.status_code == 400
    if path == "messages":
        assert re.fullmatch(rf"prompt is too long: \d+ bytes > {most} maximum", error["message"])
        return
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == next(iter(asked.get(path, chat)))
    assert f"bytes or more; expected at most {most} bytes of a prompt's text" in error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
async def test_front_refuses_long_prompt_by_its_bytes(front, path):
    """Nothing is tokenized."""
    text = "a b" * 100_000
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 9}
    asked: dict[str, Any] = {"completions": {"prompt": text}, "responses": {"input": text}}
    response = await post(front, f"/v1/{path}", json.dumps(asked.get(path, chat)))
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    if path == "messages":
        told = re.fullmatch(r"prompt is too long: (\d+) tokens > 2048 maximum", message)
        assert told is not None
        assert int(told[1]) < 100_000
    else:
        assert "tokens or more by its bytes" in message


async def test_front_blames_prompt_of_more_ids_than_it_reads(front):
    response = await post(front, "/v1/completions", json.dumps({"prompt": [5] * 5000}))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is at most 2048 tokens" in error["message"]
