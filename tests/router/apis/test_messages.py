"""Anthropic's own client against /v1/messages: text, tool calls, thinking and refusals."""

from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from baton.v1 import inference_pb2 as pb
from baton_router.routing.admission.quotas import Quota
from baton_router.text.model_card import ModelCard
from tests.support.router.event_stream import events_of
from tests.support.router.front import anthropic_client_of, front_of
from tests.support.router.scripted import decode, prefill
from tests.support.router.written import (
    NOW,
    OSLO,
    THOUGHT,
    ids_of,
    writing,
)

USER: Any = {"role": "user", "content": "How is the weather in Oslo?"}
WEATHER: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME: Any = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
CALLS: list[Any] = [("weather", {"city": "Oslo 漢"}), ("time", {})]


def given_to(model: ModelCard, **body: Any) -> dict[str, Any]:
    return {"model": model.name, "messages": [USER], "max_tokens": 200, **body}


async def ask(model: ModelCard, text: str, **body: Any) -> Message:
    """Returns the message, when the model writes `text`."""
    reason = body.pop("reason", pb.FINISH_REASON_END_OF_SEQUENCE)
    async with front_of(*writing(text, 3, reason, model), model=model) as front:
        return await anthropic_client_of(front).messages.create(**given_to(model, **body))


async def prompt_of(model: ModelCard, **body: Any) -> str:
    """Returns the prompt that the workers get for a request."""
    computing, decoding = writing("a", model=model)
    async with front_of(computing, decoding, model=model) as front:
        await anthropic_client_of(front).messages.create(**given_to(model, **body))
    (asked,) = computing.requests
    text: str = model.tokenizer.decode(list(asked.token_ids), skip_special_tokens=False)
    return text


async def refusal_of(card: ModelCard, **body: Any) -> anthropic.APIStatusError:
    async with front_of(prefill(), decode(), model=card) as front:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await anthropic_client_of(front).messages.create(**{**given_to(card), **body})
    return caught.value


def blocks_of(message: Message) -> list[Any]:
    return [block.model_dump(exclude_none=True) for block in message.content]


async def test_message_has_thinking_text_and_tool_use_as_blocks(model):
    message = await ask(model, f"{THOUGHT}I look.\n{OSLO}\n{NOW}", tools=[WEATHER, TIME])
    thought, text, *calls = message.content
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert "The user asks for Oslo: é 漢." in thought.thinking
    assert text.text.strip() == "I look."
    assert [(call.name, call.input) for call in calls] == CALLS
    assert len({call.id for call in calls}) == 2
    assert (message.stop_reason, message.role, message.model) == (
        "tool_use",
        "assistant",
        model.name,
    )
    assert message.usage.output_tokens > 10
    assert message.id == f"msg_{message._request_id}"


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_message_stream_adds_up_to_the_whole(model, size):
    text = f"{THOUGHT}I look.\n{OSLO}\n{NOW}"
    whole = await ask(model, text, tools=[WEATHER, TIME])
    async with (
        front_of(*writing(text, size, model=model), model=model) as front,
        anthropic_client_of(front).messages.stream(
            **given_to(model, tools=[WEATHER, TIME])
        ) as stream,
    ):
        types = [event.type async for event in stream]
        final = await stream.get_final_message()
    ids = [block.pop("id", None) for block in (*blocks_of(whole), *blocks_of(final))]
    assert len(ids) == 2 * len(whole.content)
    for streamed, block in zip(blocks_of(final), blocks_of(whole), strict=True):
        assert {**streamed, "id": ""} == {**block, "id": ""}
    assert (final.stop_reason, final.usage.output_tokens) == (
        "tool_use",
        whole.usage.output_tokens,
    )
    assert types[0] == "message_start"
    assert types[-2:] == ["message_delta", "message_stop"]
    assert types.count("content_block_start") == types.count("content_block_stop") == 4


async def test_raw_message_events_are_of_anthropics_types(model):
    text = f"{THOUGHT}I look.\n{OSLO}"
    async with front_of(*writing(text, model=model), model=model) as front:
        stream = await anthropic_client_of(front).messages.create(
            stream=True, **given_to(model, tools=[WEATHER])
        )
        events = [event async for event in stream]
    for event in events:  # the package accepts what it cannot parse, so its types parse it again
        type(event).model_validate(event.model_dump())
    deltas = {event.delta.type for event in events if event.type == "content_block_delta"}
    assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    opened = None
    for event in events:
        if event.type == "content_block_start":
            assert opened is None
            opened = event.index
        elif event.type == "content_block_delta":
            assert event.index == opened
        elif event.type == "content_block_stop":
            assert event.index == opened
            opened = None


@pytest.mark.symptom(
    "llama.cpp#18551",
    there="streamed thoughts have no `signature_delta`",
    here="Sends it right before the block ends.",
)
async def test_thought_is_signed_right_before_its_end(model):
    whole = await ask(model, f"{THOUGHT}I look.")
    async with front_of(*writing(f"{THOUGHT}I look.", model=model), model=model) as front:
        stream = await anthropic_client_of(front).messages.create(stream=True, **given_to(model))
        events = [event async for event in stream]
    last = next(at for at, event in enumerate(events) if event.type == "content_block_stop")
    assert events[last].index == 0
    assert events[last - 1].delta.type == "signature_delta"
    assert events[last - 1].delta.signature == whole.content[0].signature
    assert len(whole.content[0].signature) == 64
    other = await ask(model, f"{THOUGHT.replace('Oslo', 'Rome')}I look.")
    assert other.content[0].signature != whole.content[0].signature


async def test_message_begins_with_a_ping_for_clients(model):
    async with front_of(*writing("Hello.", model=model), model=model) as front:
        body = given_to(model, stream=True)
        response = await front.post("/v1/messages", json=body, headers={"x-api-key": "any"})
    events = [part.split("\n")[0] for part in response.text.strip().split("\n\n")]
    assert events[:3] == ["event: message_start", "event: ping", "event: content_block_start"]
    assert events[-1] == "event: message_stop"


async def test_cut_message_says_so_and_has_no_part_of_a_call(model):
    message = await ask(
        model, f"I look.\n{OSLO[:50]}", tools=[WEATHER], reason=pb.FINISH_REASON_LENGTH
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


async def test_stop_sequence_is_reported(model):
    several = [*map(str, range(9)), "Two"]
    message = await ask(model, "One. Two. Three.", stop_sequences=several)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Two")
    assert blocks_of(message) == [{"type": "text", "text": "One. "}]


@pytest.mark.symptom(
    "vllm#55324",
    there="`message_delta` lacks `stop_sequence`",
    here="Sends it, as null where none ended the answer.",
)
async def test_streamed_message_has_a_stop_sequence_or_null(model):
    for given, expected in ({}, None), ({"stop_sequences": ["Two"]}, "Two"):
        async with front_of(*writing("One. Two.", model=model), model=model) as front:
            body = given_to(model, stream=True, **given)
            answer = await front.post("/v1/messages", json=body)
        (event,) = (e for e in events_of(answer.content) if e["type"] == "message_delta")
        assert event["delta"]["stop_sequence"] == expected


@pytest.mark.symptom(
    "llm-scaler#341",
    there="`thinking` blocks in the history are refused",
    here="Gives them to the template as reasoning.",
)
async def test_conversation_of_blocks_becomes_messages_of_the_template(model):
    answer = await ask(model, f"{THOUGHT}I look.{OSLO}{NOW}", tools=[WEATHER, TIME])
    *_, weather, time = answer.content
    prompt = await prompt_of(
        model,
        system=[
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be short."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]},
            {"role": "assistant", "content": answer.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": weather.id, "content": "Rain."},
                    {
                        "type": "tool_result",
                        "tool_use_id": time.id,
                        "content": [{"type": "text", "text": "Noon."}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    )
    *turns, last = prompt.replace("\n", " ").split("<|im_end|> ")
    roles = ["system", "user", "assistant", "tool", "tool", "user"]
    for turn, role in zip(turns, roles, strict=True):
        assert turn.startswith(f"## {role}")
    assert "Be kind. Be short." in turns[0]
    assert "The user asks for Oslo: é 漢." in turns[2]
    assert "calls weather city=Oslo 漢 calls time" in turns[2]
    assert "I look." in turns[2]
    assert ["Rain." in turns[3], "Noon." in turns[4], "And now?" in turns[5]] == [True] * 3
    assert last.startswith("## assistant")


@pytest.mark.symptom(
    "vllm#44000",
    there="a message of the role `system` within `messages` of `/v1/messages` is refused",
    here="Takes it anywhere, as text or as blocks, and counts its tokens.",
)
@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
async def test_messages_take_system_turns_anywhere(model, content):
    answer: Any = {"role": "assistant", "content": "Rain."}
    said: Any = {"role": "system", "content": content}
    for turns, begin in (
        ([said, USER], "## systemBe brief.<|im_end|> ## user"),
        ([USER, said], "Oslo?<|im_end|> ## systemBe brief.<|im_end|> ## assistant"),
        ([USER, said, answer, USER], "Oslo?<|im_end|> ## systemBe brief.<|im_end|> ## assistant"),
    ):
        assert begin in (await prompt_of(model, messages=turns)).replace("\n", " ")
    async with front_of(prefill(), decode(), model=model) as front:
        client = anthropic_client_of(front)
        num = [
            (await client.messages.count_tokens(model=model.name, messages=turns)).input_tokens
            for turns in ([USER], [USER, said])
        ]
    assert num[1] > num[0]


async def test_messages_combine_adjacent_turns_of_one_role(model):
    text: Any = {"type": "text", "text": "b"}
    turns: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": [text]},
        {"role": "user", "content": "d"},
    ]
    prompt = await prompt_of(model, messages=turns)
    assert prompt.startswith("## usera\nb<|im_end|>\n## assistantc\nb<|im_end|>\n## userd")


async def test_result_of_a_tool_may_have_documents_and_references(model):
    use: Any = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    thought: Any = {"type": "redacted_thinking", "data": "x"}
    document: Any = {
        "type": "document",
        "title": "Plan",
        "source": {"type": "text", "data": "One."},
    }
    blocks = {"type": "content", "content": [{"type": "text", "text": "Two."}]}
    result: Any = [
        {
            "type": "search_result",
            "source": "a.html",
            "title": "A",
            "content": [{"type": "text", "text": "Rain."}],
        },
        {"type": "tool_reference", "tool_name": "weather"},
        document,
        {"type": "document", "source": blocks, "title": None, "context": None},
    ]
    turns: list[Any] = [
        USER,
        {"role": "assistant", "content": [thought, use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}, document],
        },
    ]
    prompt = await prompt_of(model, messages=turns)
    assert "## toolA\na.html\nRain.\nweather\nPlan\nOne.\nTwo.<|im_end|>" in prompt
    assert "## userPlan\nOne.<|im_end|>" in prompt


async def test_disabled_thinking_and_effort_reach_the_template(model):
    assert "<think>" not in await prompt_of(model)
    assert "<think>" in await prompt_of(model, thinking={"type": "disabled"})
    assert "effort: low" in await prompt_of(model, output_config={"effort": "low"})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_forced_call_thinks_only_where_asked_to(model, choice):
    forced: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice}
    assert "<think>" in await prompt_of(model, **forced)  # closed at once
    for asked in (
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "between_tools"}},
        {"output_config": {"effort": "low"}},
    ):
        assert "<think>" not in await prompt_of(model, **forced, **asked)


async def test_budget_of_thinking_becomes_a_grammar(model):
    computing, decoding = writing("a", model=model)
    async with front_of(computing, decoding, model=model) as front:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        await anthropic_client_of(front).messages.create(**given_to(model, thinking=thinking))
    (asked,) = computing.requests
    assert "1024" in str(asked.sampling.grammar)


async def test_budget_of_thinking_is_ignored_if_reasoning_is_unknown(model):
    card = replace(model, reasoning_format=None)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    computing, decoding = writing("a", model=card)
    async with front_of(computing, decoding, model=card) as front:
        given = given_to(card, thinking=thinking, metadata={"user_id": "a"})
        answer = await front.post("/v1/messages", json=given)
        chat = given_to(card, thinking_token_budget=1024)
        refused = await front.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get_list("x-baton-ignored") == ["metadata, thinking.budget_tokens"]
    assert not computing.requests[0].sampling.HasField("grammar")
    assert refused.json()["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
    ],
)
async def test_tool_choice_forces_calls_by_grammar(model, choice, expected):
    computing, decoding = writing(OSLO, model=model)
    async with front_of(computing, decoding, model=model) as front:
        given = given_to(model, tools=[WEATHER], tool_choice=choice)
        await anthropic_client_of(front).messages.create(**given)
    (asked,) = computing.requests
    assert asked.sampling.HasField("grammar") is expected


async def test_tool_choice_none_leaves_tools_out(model):
    prompt = await prompt_of(model, tools=[WEATHER], tool_choice={"type": "none"})
    assert "Of a city." not in prompt


async def test_count_tokens_equals_the_tokens_of_the_message(model):
    given: Any = {"messages": [USER], "system": "Be kind.", "tools": [WEATHER]}
    message = await ask(model, "a", **given)
    async with front_of(prefill(), decode(), model=model) as front:
        counted = await anthropic_client_of(front).messages.count_tokens(model=model.name, **given)
    assert counted.input_tokens == message.usage.input_tokens


async def test_message_accepts_hints_without_effect(model):
    message = await ask(
        model,
        "Hello.",
        metadata={"user_id": "a user"},
        service_tier="auto",
        tools=[{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}],
        extra_body={"cache_control": {"type": "ephemeral"}, "context_management": {"edits": []}},
        extra_headers={"anthropic-beta": "some-beta"},
    )
    assert message.usage.output_tokens == len(ids_of("Hello.", model))


@pytest.mark.symptom(
    "vllm#47746",
    there="blocks lack required fields",
    here="Answers 400 with the path of the field.",
)
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages: do not end"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "container_uplod"}]}]},
            "messages[0].content[0].type",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": [{"type": "document", "source": s}]}]},
                "messages[0].content[0].source.type",
            )
            for s in ({"type": "url", "url": "https://a/b.pdf"}, {"type": "base64", "data": ""})
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "system", "content": [{"type": "thinking", "thinking": "Hm."}]},
                ]
            },
            "messages[1].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}
                ]
            },
            "messages[0].content[0].tool_use_id",
        ),
        *(
            ({"messages": [{"role": "user", "content": [block]}]}, f"messages[0].content[0].{name}")
            for block, name in (
                ({"type": "text"}, "text"),
                ({"type": "image"}, "source"),
                ({"type": "tool_result"}, "tool_use_id"),
            )
        ),
        *(
            (
                {"messages": [USER, {"role": "assistant", "content": [block]}, USER]},
                f"messages[1].content[0].{name}",
            )
            for block, name in (
                ({"type": "tool_use", "name": "f", "input": {}}, "id"),
                ({"type": "tool_use", "id": "c", "input": {}}, "name"),
                ({"type": "thinking", "signature": ""}, "thinking"),
            )
        ),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}, {**WEATHER, "name": "a b"}]},
            "tools[1].name",
        ),
        ({"tools": [{**WEATHER, "type": "function"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
            "tool_choice",
        ),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"container": "x"}}, "container"),
    ],
)
async def test_front_refuses_bad_message_by_name_of_field(model, body, field):
    refusal = await refusal_of(model, **body)
    assert isinstance(refusal, anthropic.BadRequestError)
    assert refusal.body["type"] == "error"
    assert refusal.body["error"]["type"] == "invalid_request_error"
    assert refusal.body["error"]["message"].startswith(field), refusal.body


async def test_message_errors_are_those_of_anthropics_client(model):
    assert isinstance(await refusal_of(model, model="other"), anthropic.NotFoundError)
    async with front_of(prefill(), decode(), model=model) as front:
        unknown = await front.get("/v1/messages/x")
        assert unknown.json()["error"]["type"] == "not_found_error"
        invalid = await front.post(
            "/v1/messages", content=b"{", headers={"content-type": "application/json"}
        )
        assert invalid.json()["type"] == "error"
    limits = Quota(requests_per_minute=1)
    async with front_of(*writing("a", model=model), model=model, limits=limits) as front:
        client = anthropic_client_of(front)
        await client.messages.create(**given_to(model))
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**given_to(model))
    assert caught.value.body["error"]["type"] == "rate_limit_error"
