"""Tool calls, reasoning and refusals of /v1/responses, as OpenAI's client sees them."""

import itertools
import json
from typing import Any

import openai
import pytest

from baton.errors import DeadlineExceededError
from baton.v1 import inference_pb2 as pb
from baton_router.apis.responses.functions import Functions
from baton_router.apis.responses.schemas import FunctionTool, Namespace
from baton_router.text.model_card import ModelCard
from tests.support.router.event_stream import events_of
from tests.support.router.front import front_of, openai_client_of
from tests.support.router.scripted import Cue, decode, prefill
from tests.support.router.written import (
    NOW,
    OSLO,
    THOUGHT,
    ids_of,
    writing,
)

QUESTION = "How is the weather in Oslo?"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
TIME: Any = {
    "type": "function",
    "name": "time",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALLS = [("weather", '{"city": "Oslo 漢"}'), ("time", "{}")]


async def ask(model: ModelCard, text: str, size: int = 3, **body: Any) -> Any:
    """Returns the response, or the events of a stream, when the model writes `text`."""
    reason = body.pop("reason", pb.FINISH_REASON_END_OF_SEQUENCE)
    given = {"input": QUESTION, "tools": [WEATHER, TIME], "max_output_tokens": 200, **body}
    async with front_of(*writing(text, size, reason, model), model=model) as front:
        answer = await openai_client_of(front).responses.create(model=model.name, **given)
        return [event async for event in answer] if given.get("stream") else answer


async def prompt_of(model: ModelCard, **body: Any) -> str:
    """Returns the prompt that the workers get for a request."""
    computing, decoding = writing("a", model=model)
    async with front_of(computing, decoding, model=model) as front:
        given = {"model": model.name, "max_output_tokens": 8, **body}
        await openai_client_of(front).responses.create(**given)
    (asked,) = computing.requests
    text: str = model.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)
    return text


async def refusal_of(model: ModelCard, **body: Any) -> openai.BadRequestError:
    async with front_of(prefill(), decode(), model=model) as front:
        with pytest.raises(openai.BadRequestError) as caught:
            await openai_client_of(front).responses.create(
                **{"model": model.name, "input": QUESTION, **body}
            )
    return caught.value


async def test_response_has_reasoning_text_and_calls_as_items(model):
    answer = await ask(model, f"{THOUGHT}I look.\n{OSLO}\n{NOW}")
    thought, message, *calls = answer.output
    assert [item.type for item in answer.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert "The user asks for Oslo: é 漢." in thought.content[0].text
    assert message.content[0].text.strip() == "I look."
    assert [(call.name, call.arguments) for call in calls] == CALLS
    assert len({call.call_id for call in calls}) == 2
    assert answer.status == "completed"
    assert all(item.status == "completed" for item in answer.output)


@pytest.mark.symptom(
    "llama.cpp#20607, lemonade#3607",
    there="events of a response have wrong indices and ids of items",
    here="Names in each delta the item that was opened last.",
)
@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_response_stream_adds_up_to_the_whole(model, size):
    text = f"{THOUGHT}I look.\n{OSLO}\n{NOW}"
    expected = await ask(model, text)
    events = await ask(model, text, size, stream=True)
    for event in events:  # the package accepts what it cannot parse, so its types parse it again
        type(event).model_validate(event.model_dump(by_alias=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    items = json.loads(json.dumps([item.model_dump() for item in expected.output]))
    grown: dict[int, str] = {}
    open_item = None
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            open_item, item_id = event.output_index, event.item.id
            grown[open_item] = ""
        elif kind.endswith(".delta"):
            assert (event.output_index, event.item_id) == (open_item, item_id)
            grown[open_item] += event.delta
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert grown[open_item] == event.text
        elif kind == "function_call_arguments.done":
            assert grown[open_item] == event.arguments
        elif kind == "output_item.done":
            assert _content(event.item) == grown[open_item] == _content(items[open_item])
            open_item = None
    last = events[-1]
    assert last.type == "response.completed"
    assert [_content(item) for item in last.response.output] == [_content(i) for i in items]


def _content(item: Any) -> str:
    item = item if isinstance(item, dict) else item.model_dump()
    if item["type"] == "function_call":
        return str(item["arguments"])
    return str(item["content"][0]["text"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["It rains.", OSLO, f"I look.\n{OSLO}{NOW}"])
async def test_response_counts_tokens_of_reasoning(model, stream, after):
    answer = await ask(model, f"{THOUGHT}{after}", stream=stream)
    usage = (answer[-1].response if stream else answer).usage
    num_tokens = len(ids_of("\nThe user asks for Oslo: é 漢.\n", model))  # between the marks
    assert usage.output_tokens_details.reasoning_tokens == num_tokens
    plain = await ask(model, "It rains.")
    assert plain.usage.output_tokens_details.reasoning_tokens == 0


LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "text",
    [
        "It rains: é 漢 <b>.",
        f"{THOUGHT}I look.\n{OSLO}",
        f"{THOUGHT}It rains.{NOW}{OSLO}",
        f"{OSLO}\nOslo 漢 it is.",
    ],
)
async def test_response_has_logprobs_of_its_text(model, size, text):
    """Those of the tokens of its text alone, the same whole and in the deltas."""
    answer = await ask(model, text, size, include=LOGPROBS)
    (message,) = [item for item in answer.output if item.type == "message"]
    (part,) = message.content
    told = b"".join(bytes(entry.bytes) for entry in part.logprobs).decode()
    # Tokens of marks may have space in them that belongs to the text.
    assert told.strip() == part.text.strip()
    assert {entry.logprob for entry in part.logprobs} == {-0.5}
    events = await ask(model, text, size, include=LOGPROBS, stream=True)
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    done = next(e for e in events if e.type == "response.output_text.done")
    streamed = [entry.token for event in deltas for entry in event.logprobs]
    assert streamed == [entry.token for entry in done.logprobs]
    assert streamed == [entry.token for entry in part.logprobs]
    plain = await ask(model, text, size)
    (message,) = [item for item in plain.output if item.type == "message"]
    assert message.content[0].logprobs == []


async def test_response_has_the_most_likely_tokens(model):
    computing, decoding = writing("It rains.", model=model)
    async with front_of(computing, decoding, model=model) as front:
        given = {"model": model.name, "input": "Hi.", "top_logprobs": 2}
        answer = (await front.post("/v1/responses", json=given)).json()
        include = [*LOGPROBS, "reasoning.encrypted_content"]
        named = await front.post("/v1/responses", json={**given, "include": include})
        own = await front.post("/v1/responses", json={**given, "include": LOGPROBS})
    asked = computing.requests[0].sampling
    assert (asked.logprobs, asked.top_logprobs, answer["top_logprobs"]) == (True, 2, 2)
    assert answer["output"][0]["content"][0]["logprobs"]
    assert named.headers["x-baton-ignored"] == "include"
    assert "x-baton-ignored" not in own.headers


# What Open Responses requires of every response, and the values that a request gave.
GIVEN: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "max_tool_calls": 3,
    "service_tier": "flex",
    "safety_identifier": "someone",
    "prompt_cache_key": "key",
    "temperature": 0.5,
    "top_p": 0.9,
    "max_output_tokens": 200,
    "instructions": "Be kind.",
    "metadata": {"a": "b"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "high", "summary": "auto"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "truncation": "disabled",
    "previous_response_id": None,
}
OTHERS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("output", "error", "tools", "top_logprobs", "usage", "store", "background"),
}


async def test_response_says_that_a_format_is_not_strict(model):
    given = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": None}
    wanted = {"input": QUESTION, "text": {"format": given}}
    async with front_of(*writing("{}", model=model), model=model) as front:
        answer = await front.post("/v1/responses", json=wanted)
    assert answer.json()["text"]["format"] == {**given, "strict": False, "description": None}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, GIVEN])
async def test_response_has_required_fields_and_what_was_given(model, stream, given):
    wanted = {"input": QUESTION, "max_output_tokens": 200, "stream": stream, **given}
    async with front_of(*writing("Hello.", model=model), model=model) as front:
        answer = await front.post("/v1/responses", json=wanted)
    assert answer.status_code == 200, answer.text
    if stream:
        events = events_of(answer.content)
        responses = [event["response"] for event in events if "response" in event]
        assert len(responses) == 3
    else:
        responses = [answer.json()]
    for response in responses:
        assert {*GIVEN, *OTHERS} <= response.keys()
        assert {name: response[name] for name in given} == given
        has_ended = response["status"] == "completed"
        assert (response["completed_at"] is not None) == has_ended
        if not given:
            assert response["service_tier"] == "default"


@pytest.mark.parametrize(("text", "kind"), [("Hello there.", "message"), (OSLO, "function_call")])
async def test_failed_response_stream_closes_its_items(model, text, kind):
    computing, decoding = writing(f"{THOUGHT}{text}", 1, model=model)
    over = DeadlineExceededError("its time is over")  # for which no other worker is tried
    is_begun = Cue()  # gRPC may leave out what comes right before an error
    decoding.script[-1 if kind == "message" else -8 :] = [is_begun, over]
    items = itertools.count(1)

    def note(part: bytes) -> None:
        if b"response.output_item.added" in part and next(items) == 2:
            is_begun.event.set()

    async with front_of(computing, decoding, model=model, on_body=note) as front:
        stream = await openai_client_of(front).responses.create(
            model=model.name,
            input=QUESTION,
            tools=[WEATHER],
            tool_choice="auto" if kind == "message" else "required",
            max_output_tokens=200,
            stream=True,
        )
        *events, error, last = [event async for event in stream]
    assert (error.type, last.type) == ("error", "response.failed")
    assert [e.type for e in events if "item." in e.type] == [
        "response.output_item.added",
        "response.output_item.done",
    ] * 2
    assert (events[-1].item.type, events[-1].item.status) == (kind, "incomplete")
    assert [item.status for item in last.response.output] == ["completed", "incomplete"]


async def test_cut_call_is_incomplete_and_not_sent_to_the_model(model):
    answer = await ask(model, OSLO[:60], reason=pb.FINISH_REASON_LENGTH)
    (call,) = answer.output
    assert (answer.status, call.status) == ("incomplete", "incomplete")
    prompt = await prompt_of(model, input=[{"role": "user", "content": "Hi."}, call])
    assert "calls weather" not in prompt


@pytest.mark.symptom(
    "llama.cpp#23465",
    there="the output of a call as a list of parts is refused",
    here="Takes it.",
)
async def test_conversation_of_items_becomes_messages_of_the_template(model):
    answer = await ask(model, f"{THOUGHT}I look.{OSLO}{NOW}")
    _, _, weather, time = answer.output
    prompt = await prompt_of(
        model,
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
            *answer.output,
            {"type": "function_call_output", "call_id": weather.call_id, "output": "Rain."},
            {
                "type": "function_call_output",
                "call_id": time.call_id,
                "output": [{"type": "input_text", "text": "Noon."}],
            },
        ],
    )
    *turns, last = prompt.replace("\n", " ").split("<|im_end|> ")
    roles = ["system", "user", "assistant", "tool", "tool"]
    for turn, role in zip(turns, roles, strict=True):
        assert turn.startswith(f"## {role}")
    assert "Be kind.  Be short." in turns[0]
    assert QUESTION in turns[1]
    assert "The user asks for Oslo: é 漢." in turns[2]
    assert "calls weather city=Oslo 漢 calls time" in turns[2]
    assert "I look." in turns[2]
    assert ["Rain." in turns[3], "Noon." in turns[4]] == [True, True]
    assert last.startswith("## assistant")


async def test_input_may_be_empty_where_there_is_a_conversation(model, redis):
    prompt = await prompt_of(model, input=[], instructions="Be kind.")
    assert prompt.startswith("## system")
    computing, decoding = writing("Hello.", model=model)
    async with front_of(computing, decoding, model=model, responses_ttl=60.0, redis=redis) as front:
        client = openai_client_of(front)
        first = await client.responses.create(model=model.name, input=QUESTION)
        await client.responses.create(model=model.name, input=[], previous_response_id=first.id)
    prompt = model.tokenizer.decode(list(computing.requests[1].token_ids))
    assert prompt.count("Hello.") == 1


@pytest.mark.parametrize("longest", [{}, {"k" * 64: "a" * 512}])
async def test_metadata_comes_back_up_to_its_bounds(model, longest):
    given = {**{str(number): "a" for number in range(15)}, **longest}
    assert (await ask(model, "Hello.", metadata=given)).metadata == given


async def test_reasoning_effort_reaches_the_template(model):
    prompt = await prompt_of(model, input="Hi.", reasoning={"effort": "high"})
    assert "effort: high" in prompt


# As Codex sends functions of agents and of MCP servers: in namespaces.
CLOCK: Any = {
    "type": "namespace",
    "name": "mcp/clock",
    "description": "Tells the time.",
    "tools": [TIME, {"type": "custom", "name": "patch"}],
}
CLOCK_CALL = NOW.replace("time", "mcp_clock__time")


@pytest.mark.parametrize("stream", [False, True])
async def test_function_of_namespace_is_called_and_comes_back_in_it(model, stream):
    answer = await ask(model, f"{CLOCK_CALL}\n{NOW}", tools=[TIME, CLOCK], stream=stream)
    response = answer[-1].response if stream else answer
    calls = [(call.name, call.namespace) for call in response.output]
    assert calls == [("time", "mcp/clock"), ("time", None)]
    assert [tool.type for tool in response.tools] == ["function", "namespace"]
    if stream:
        items = [e.item for e in answer if e.type.startswith("response.output_item.")]
        assert [item.namespace for item in items] == ["mcp/clock"] * 2 + [None] * 2
        names = [e.name for e in answer if e.type == "response.function_call_arguments.done"]
        assert names == ["time", "time"]


async def test_functions_of_namespaces_have_names_of_their_own(model):
    taken = {**TIME, "name": "mcp_clock__time"}
    zone = {**TIME, "name": "zone", "description": "Of a zone."}
    clock = {**CLOCK, "tools": [*CLOCK["tools"], zone]}
    prompt = await prompt_of(
        model,
        tools=[clock, taken, TIME],
        input=[
            {"role": "user", "content": QUESTION},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "time",
                "namespace": "mcp/clock",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "Noon."},
        ],
    )
    described, *_ = prompt.split("<|im_end|>")
    assert described.count("Tells the time.") == 2  # of two functions in the namespace
    assert '"description": "Tells the time.\\n\\nOf a zone."' in described
    for name in ("mcp_clock__time_2", "mcp_clock__time", "time"):
        assert described.count(f'"name": "{name}"') == 1
    assert "calls mcp_clock__time_2" in prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "a"}}, f"metadata.{'k' * 64}"),
        ({"metadata": {"k": "a" * 513}}, "metadata.k"),
        ({"tools": [WEATHER, {**TIME, "async": True}]}, "tools[1].async"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
        ({"input": [{"type": "web_serch_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "call_9", "output": "x"}]},
            "input[0].call_id",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}, {**WEATHER, "name": "a b"}]}, "tools[1].name"),
        (
            {
                "tools": [
                    WEATHER,
                    {"type": "web_search"},
                    {"type": "namespace", "name": "n", "tools": [TIME, {**TIME, "name": "a b"}]},
                ],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "a b", "namespace": "n"}],
                },
            },
            "tools[2].tools[1].name",
        ),
    ],
)
async def test_front_refuses_bad_response_by_name_of_field(model, body, param):
    assert (await refusal_of(model, **body)).param == param


REFERRED = f"{THOUGHT}I look.\n{OSLO}"
RAIN: Any = {"type": "function_call_output", "output": "Rain."}


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}], ids=str)
@pytest.mark.parametrize("has_previous", [False, True])
async def test_item_reference_stands_for_its_stored_item(model, redis, kind, has_previous):
    computing, decoding = writing(REFERRED, model=model)
    workers = computing, decoding
    async with front_of(*workers, model=model, responses_ttl=60.0, redis=redis) as front:
        client = openai_client_of(front)
        first = await client.responses.create(
            model=model.name, input=QUESTION, tools=[WEATHER], max_output_tokens=200
        )
        assert first.store is True
        references = [{"id": item.id, **kind} for item in first.output]
        last = [{**RAIN, "call_id": first.output[-1].call_id}, {"role": "user", "content": "And?"}]
        user = {"role": "user", "content": QUESTION}
        ways: list[dict[str, Any]] = [
            {"input": [user, *first.output, *last]},
            {"input": [user, *references, *references, *last]},
        ]
        if has_previous:
            ways[1] = {"input": [*references, *last], "previous_response_id": first.id}
        stored = []
        for given in ways:
            answer = await client.responses.create(
                model=model.name, tools=[WEATHER], max_output_tokens=200, **given
            )
            stored.append(answer.id)
        # So that an answer that begins with a reference can be continued.
        for answer_id in stored:
            await client.responses.create(
                model=model.name, input="x", previous_response_id=answer_id, max_output_tokens=200
            )
    _, whole, referred, *continued = computing.requests
    assert list(whole.token_ids) == list(referred.token_ids)
    assert list(continued[0].token_ids) == list(continued[1].token_ids)
    prompt = model.tokenizer.decode(list(referred.token_ids), skip_special_tokens=False)
    assert prompt.count("calls weather") == 1
    assert prompt.count("The user asks for Oslo: é 漢.") == 1


async def test_input_items_of_a_stored_response_are_listed(model, redis):
    computing, decoding = writing(OSLO, model=model)
    workers = computing, decoding
    async with front_of(*workers, model=model, responses_ttl=60.0, redis=redis) as front:
        client = openai_client_of(front)
        given: dict[str, Any] = {"model": model.name, "max_output_tokens": 200, "tools": [WEATHER]}
        first = await client.responses.create(**given, input=QUESTION)
        rain = {**RAIN, "call_id": first.output[0].call_id}
        said = {"role": "assistant", "content": "Hm."}
        second = await client.responses.create(
            **given, input=[said, rain], previous_response_id=first.id
        )
        listed = client.responses.input_items.list
        items = [item async for item in await listed(second.id, order="asc")]
        pages = [item.id async for item in await listed(second.id, limit=1)]
        third = await client.responses.create(
            **given,
            input=[{"type": "item_reference", "id": items[0].id}],
            previous_response_id=first.id,
        )
        whole = (await front.get(f"/v1/responses/{third.id}/input_items?limit=1")).json()
        for name, value in (("limit", "0"), ("limit", "x"), ("order", "up")):
            answer = await front.get(f"/v1/responses/{second.id}/input_items", params={name: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        unknown = await front.get(f"/v1/responses/{second.id}/input_items?after=msg_1")
        assert unknown.status_code == 404
    kinds = [item.type for item in items]
    assert kinds == ["message", "function_call", "message", "function_call_output"]
    assert items[0].content[0].text == QUESTION
    assert items[1].id == first.output[0].id
    assert items[2].content[0].text == "Hm."
    assert pages == [item.id for item in reversed(items)]
    assert len({*pages}) == 4
    # The item was there already.
    assert whole["data"][0]["id"] == items[1].id
    assert whole["has_more"] is True


async def test_input_tokens_are_those_of_the_response(model):
    given: Any = {"input": QUESTION, "instructions": "Be kind.", "tools": [WEATHER]}
    answer = await ask(model, "a", **given)
    async with front_of(prefill(), decode(), model=model) as front:
        counted = await front.post(
            "/v1/responses/input_tokens", json={"model": model.name, **given}
        )
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": answer.usage.input_tokens,
    }


@pytest.mark.parametrize("item_id", ["msg_1", "rs_{}_0", "msg_{}_0", "{}"])
async def test_unknown_item_reference_is_not_found(model, redis, item_id):
    workers = writing("Hello.", model=model)
    given = [{"role": "user", "content": "Hi."}, {"id": item_id.format("0" * 48)}]
    async with front_of(*workers, model=model, responses_ttl=60.0, redis=redis) as front:
        client = openai_client_of(front)
        known = await client.responses.create(model=model.name, input=QUESTION)
        given.append({"id": known.output[0].id.removesuffix("_0") + "_9"})
        for items in (given[:2], given[::2]):
            with pytest.raises(openai.NotFoundError, match=r"input\[1\]\.id: item .* is unknown"):
                await client.responses.create(model=model.name, input=items)
        again = {"id": known.output[0].id}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(
                model=model.name, input=[again, again, {"role": "robot", "content": "x"}]
            )
        assert caught.value.param == "input[2].role"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model=model.name, input=[{"type": "item_reference"}])


async def test_front_without_store_says_so(model):
    answer = await ask(model, "a", store=True)
    assert answer.store is False
    async with front_of(prefill(), decode(), model=model) as front:
        client = openai_client_of(front)
        with pytest.raises(openai.NotFoundError, match="--responses-ttl-s 0"):
            await client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="--responses-ttl-s 0") as caught:
            await client.responses.create(
                model=model.name, input="x", previous_response_id=answer.id
            )
    error = caught.value
    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.symptom(
    "bifrost#2441",
    there="an unknown `previous_response_id` has a code that clients do not know",
    here="Answers 400 with `previous_response_not_found`.",
)
@pytest.mark.parametrize("response_id", [f"resp_{'0' * 48}", "resp_1", "", "deleted"])
async def test_unknown_previous_response_has_its_own_code(model, redis, response_id):
    workers = writing("Hello.", model=model)
    async with front_of(*workers, model=model, responses_ttl=60.0, redis=redis) as front:
        if response_id == "deleted":
            first = (await front.post("/v1/responses", json={"input": QUESTION})).json()
            assert first["store"] is True
            response_id = first["id"]
            await front.delete(f"/v1/responses/{response_id}")
        asked = {"input": "x", "previous_response_id": response_id}
        answers = [
            await front.post("/v1/responses", json=asked),
            await front.post("/v1/responses", json={**asked, "stream": True}),
            await front.post("/v1/responses/input_tokens", json=asked),
        ]
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "previous_response_not_found")
        assert (error["type"], error["param"]) == ("invalid_request_error", "previous_response_id")
        assert "Send the whole conversation" in error["message"]


async def test_response_is_answered_where_redis_does_not_answer(model):
    async with front_of(*writing("Hello.", model=model), model=model, responses_ttl=60.0) as front:
        client = openai_client_of(front)
        answer = await client.responses.create(model=model.name, input=QUESTION)
        assert (answer.output_text, answer.store) == ("Hello.", False)
        for call in (
            client.responses.retrieve(answer.id),
            client.responses.delete(answer.id),
            client.responses.create(model=model.name, input="x", previous_response_id=answer.id),
        ):
            with pytest.raises(openai.InternalServerError, match="Redis does not answer") as error:
                await call
            assert error.value.status_code == 503


def test_functions_of_one_name_get_names_of_their_own_in_one_go():
    """As many as a body may have. Each counted from one, they would take longer than a test may."""
    functions = Functions([Namespace(name="n", tools=[FunctionTool(name="f")] * 10_000)])
    names = [function.name for function in functions.all]
    assert names[:3] == ["n__f", "n__f_2", "n__f_3"]
    assert len({*names}) == 10_000
