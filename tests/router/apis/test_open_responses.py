"""Compliance cases of Open Responses (openresponses.org), as a list of our own.

Each is sent whole and streamed, and the types of Open Responses and of OpenAI's client validate the
answer and each event on its way (`tests/support/router/api_types.py`). What is checked here is what
types do not say: the order of events, and what the items are. The case with an image is
`test_responses_take_images` of `tests/router/text/images/test_http_images.py`, which has a model of
images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from baton.v1 import inference_pb2 as pb
from baton_router.text.model_card import ModelCard
from tests.support.router.event_stream import events_of
from tests.support.router.front import front_of
from tests.support.router.written import NOW, OSLO, THOUGHT, writing

Json = dict[str, Any]
USER: Json = {"type": "message", "role": "user", "content": "How is the weather in Oslo?"}
WEATHER: Json = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME: Json = {
    "type": "function",
    "name": "time",
    "description": None,
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALL: Json = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"city": "Oslo"}',
    "status": "completed",
}
RESULT: Json = {"type": "function_call_output", "call_id": "call_1", "output": "Rain."}
SAID: Json = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "It rains.", "annotations": []}],
}
THOUGHT_ITEM: Json = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "They ask for Oslo."}],
}
CHOICE: Json = {"type": "function", "name": "weather"}
SCHEMA: Json = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """Request, with the text that the model writes and the types of the items that come of it.

    Attributes:
        sees: texts that the prompt has, in order.
        is_cut: the model stops at the bound of its tokens.
    """

    body: Json
    text: str = "It rains."
    kinds: Sequence[str] = ("message",)
    sees: Sequence[str] = ()
    is_cut: bool = False
    gives_back: Json = field(default_factory=dict)


CASES = {
    "text": Case({"input": "Hello."}, sees=["Hello."]),
    "a message": Case({"input": [USER]}, sees=["How is the weather"]),
    "a message without its type": Case(
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello."}]}]},
        sees=["Hello."],
    ),
    "instructions": Case(
        {"instructions": "Be kind.", "input": [USER]},
        sees=["## systemBe kind.", "## user"],
        gives_back={"instructions": "Be kind."},
    ),
    "system prompt": Case(
        {"input": [{"type": "message", "role": "system", "content": "Be kind."}, USER]},
        sees=["## systemBe kind.", "## user"],
    ),
    "developer prompt": Case(
        {"input": [{"type": "message", "role": "developer", "content": "Be kind."}, USER]},
        sees=["## systemBe kind.", "## user"],
    ),
    "several turns": Case(
        {"input": [USER, SAID, {**USER, "content": "And tomorrow?"}]},
        sees=["How is", "## assistantIt rains.", "And tomorrow?"],
    ),
    "reasoning": Case({"input": [USER]}, f"{THOUGHT}It rains.", ["reasoning", "message"]),
    "reasoning of an earlier turn": Case(
        {"input": [USER, THOUGHT_ITEM, SAID, USER]}, sees=["They ask for Oslo.", "It rains."]
    ),
    "reasoning effort": Case(
        {"input": [USER], "reasoning": {"effort": "low", "summary": None}},
        sees=["effort: low"],
        gives_back={"reasoning": {"effort": "low", "summary": None}},
    ),
    "a call": Case({"input": [USER], "tools": [WEATHER]}, OSLO, ["function_call"], ["Of a city."]),
    "a call after a thought": Case(
        {"input": [USER], "tools": [WEATHER]}, THOUGHT + OSLO, ["reasoning", "function_call"]
    ),
    "several calls": Case(
        {"input": [USER], "tools": [WEATHER, TIME]}, OSLO + NOW, ["function_call"] * 2
    ),
    "a required call": Case(
        {"input": [USER], "tools": [WEATHER], "tool_choice": "required"},
        OSLO,
        ["function_call"],
        gives_back={"tool_choice": "required"},
    ),
    "a named call": Case(
        {
            "input": [USER],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "name": "weather"},
        },
        OSLO,
        ["function_call"],
        gives_back={"tool_choice": CHOICE},
    ),
    "one call at a time": Case(
        {"input": [USER], "tools": [WEATHER], "parallel_tool_calls": False},
        OSLO,
        ["function_call"],
        gives_back={"parallel_tool_calls": False},
    ),
    "no call": Case({"input": [USER], "tools": [WEATHER], "tool_choice": "none"}),
    "allowed tools": Case(
        {
            "input": [USER],
            "tools": [WEATHER, TIME],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "time"}],
            },
        },
        NOW,
        ["function_call"],
    ),
    "the result of a call": Case(
        {"input": [USER, CALL, RESULT], "tools": [WEATHER]},
        sees=["calls weather city=Oslo", "## toolRain."],
    ),
    "the result of a call, in parts": Case(
        {
            "input": [USER, CALL, {**RESULT, "output": [{"type": "input_text", "text": "Rain."}]}],
            "tools": [WEATHER],
        },
        sees=["calls weather city=Oslo", "## toolRain."],
    ),
    "JSON by a schema": Case(
        {
            "input": [USER],
            "text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}},
        },
        '{"city":"Oslo"}',
    ),
    "any JSON": Case({"input": [USER], "text": {"format": {"type": "json_object"}}}, '{"a":1}'),
    "log-probabilities": Case(
        {"input": [USER], "include": ["message.output_text.logprobs"], "top_logprobs": 1},
        gives_back={"top_logprobs": 1},
    ),
    "a bound": Case(
        {"input": [USER], "max_output_tokens": 100},
        is_cut=True,
        gives_back={"max_output_tokens": 100},
    ),
    "a bound within a call": Case(
        {"input": [USER], "tools": [WEATHER]}, OSLO[:60], ["function_call"], is_cut=True
    ),
    "sampling": Case(
        {
            "input": [USER],
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
        },
        gives_back={"temperature": 0.5, "top_p": 0.9, "frequency_penalty": -0.5},
    ),
    "metadata": Case(
        {"input": [USER], "metadata": {"a": "b"}, "user": "someone", "store": False},
        gives_back={"metadata": {"a": "b"}, "user": "someone", "store": False},
    ),
}


async def sent(model: ModelCard, case: Case, *, stream: bool) -> tuple[httpx.Response, str]:
    """Returns the answer, and the prompt that the workers got."""
    reason = pb.FINISH_REASON_LENGTH if case.is_cut else pb.FINISH_REASON_END_OF_SEQUENCE
    computing, decoding = writing(case.text, 2, reason, model)
    body = {"model": model.name, "max_output_tokens": 200, "stream": stream, **case.body}
    async with front_of(computing, decoding, model=model) as front:
        answer = await front.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    (asked,) = computing.requests
    return answer, model.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)


def content_of(item: Json) -> str:
    return item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]


def without_ids(response: Json) -> Json:
    """The fields that two answers to one request share."""
    names = ("id", "created_at", "completed_at", "output")
    kept = {name: value for name, value in response.items() if name not in names}
    return {**kept, "output": [(i["type"], content_of(i), i["status"]) for i in response["output"]]}


@pytest.mark.parametrize("name", CASES)
async def test_response_is_that_of_open_responses(model, name):
    case = CASES[name]
    answer, prompt = await sent(model, case, stream=False)
    at = 0
    for text in case.sees:
        assert text in prompt[at:], prompt
        at = prompt.index(text, at)
    response = answer.json()
    assert [item["type"] for item in response["output"]] == list(case.kinds)
    assert response["status"] == ("incomplete" if case.is_cut else "completed")
    expected = {"reason": "max_output_tokens"} if case.is_cut else None
    assert response["incomplete_details"] == expected
    assert {given: response[given] for given in case.gives_back} == case.gives_back
    *whole, last = response["output"]
    assert all(item["status"] == "completed" for item in whole)
    assert last["status"] == response["status"]
    assert len({item["id"] for item in response["output"]}) == len(response["output"])

    streamed, same_prompt = await sent(model, case, stream=True)
    assert same_prompt == prompt
    events = events_of(streamed.content)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{response['status']}"
    assert without_ids(events[-1]["response"]) == without_ids(response)
    check_items(events[2:-1])


def check_items(events: Sequence[Json]) -> None:
    """Checks that one item is open at a time, that its deltas are what it is done with, and that
    each event names the item."""
    item: Json | None = None
    written = ""
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert item is None
            item, written = event["item"], ""
            assert item["status"] == "in_progress"
            continue
        assert item is not None
        if kind == "output_item.done":
            assert event["item"]["id"] == item["id"]
            assert content_of(event["item"]) == written
            item = None
            continue
        assert event["item_id"] == item["id"]
        if kind.endswith(".delta"):
            written += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == written
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == written
    assert item is None


@pytest.mark.parametrize("name", ["text", "reasoning", "a call after a thought", "several calls"])
async def test_items_of_a_response_are_taken_back(model, name):
    """Unchanged, as the input of the next turn."""
    answer, _ = await sent(model, CASES[name], stream=False)
    output = answer.json()["output"]
    results = [
        {**RESULT, "call_id": item["call_id"]} for item in output if item["type"] == "function_call"
    ]
    back = Case({**CASES[name].body, "input": [USER, *output, *results, USER]})
    _, prompt = await sent(model, back, stream=False)
    for item in output:
        said = f"calls {item['name']}" if "name" in item else content_of(item).strip()
        assert said in prompt


async def test_response_continues_the_previous_one(model, redis):
    computing, decoding = writing(f"{THOUGHT}It rains.", 2, model=model)
    workers = computing, decoding
    async with front_of(*workers, model=model, responses_ttl=60.0, redis=redis) as front:
        body = {"model": model.name, "input": [USER], "max_output_tokens": 200}
        first = (await front.post("/v1/responses", json=body)).json()
        again = {"input": "Sure?", "previous_response_id": first["id"], "stream": True}
        answer = await front.post("/v1/responses", json={**body, **again})
        stored = (await front.get(f"/v1/responses/{first['id']}")).json()
    assert stored == first
    assert events_of(answer.content)[-1]["response"]["previous_response_id"] == first["id"]
    prompt = model.tokenizer.decode(list(computing.requests[1].token_ids))
    at = [prompt.index(text) for text in ("How is the weather", "It rains.", "Sure?")]
    assert at == sorted(at)


ERRORS: dict[str, tuple[Json, int, str | None]] = {
    "no input": ({}, 400, "input"),
    "an unknown model": ({"input": "Hi.", "model": "none"}, 404, "model"),
    "an unknown role": ({"input": [{**USER, "role": "robot"}]}, 400, "input[0].role"),
    "an unknown item": ({"input": [{"type": "robot"}]}, 400, "input[0].type"),
    "an unknown previous response": (
        {"input": "Hi.", "previous_response_id": f"resp_{'0' * 48}"},
        400,
        "previous_response_id",
    ),
    "a number out of bounds": ({"input": "Hi.", "temperature": -1}, 400, "temperature"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "status", "param"), ERRORS.values(), ids=ERRORS)
async def test_error_is_that_of_open_responses(model, body, status, param, stream):
    """With its own status and a body of its own, also where a stream was asked for."""
    async with front_of(*writing("a", model=model), model=model) as front:
        answer = await front.post("/v1/responses", json={"stream": stream, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["type"]
    assert error["message"]
