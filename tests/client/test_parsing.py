"""Tools and parsed outputs through the client: what the router gets, and what its events become."""

import json
from collections.abc import Iterator

import pytest

from baton import Client, errors
from baton.client.client import (
    Message,
    OutputParsing,
    ReasoningPart,
    TextPart,
    Tool,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from baton.v1 import inference_pb2 as pb
from tests.support.router.fake_router import FakeRouter, accepted, finished, tokens

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("weather", "Of a city.", SCHEMA, strict=True)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout=10.0) as client:
        yield client


def sent(router: FakeRouter) -> pb.GenerateRequest:
    request = router.requests[0]
    assert isinstance(request, pb.GenerateRequest)
    return request


def test_generate_sends_tools_and_options(client, router):
    parsing = OutputParsing(
        [WEATHER],
        tool_name="weather",
        one_tool_call=True,
        max_reasoning_tokens=5,
        template_variables={"enable_thinking": True},
    )
    client.generate("Hi", parsing=parsing).text()
    message = sent(router).parsing
    assert (message.tools[0].name, message.tools[0].strict) == ("weather", True)
    assert json.loads(message.tools[0].parameters_json_schema) == SCHEMA
    assert (message.tool_choice, message.tool_name) == (pb.TOOL_CHOICE_NAMED, "weather")
    assert (message.one_tool_call, message.reasoning) == (True, True)
    assert message.max_reasoning_tokens == 5
    assert json.loads(message.template_variables) == {"enable_thinking": True}


def test_generate_sends_no_parsing_unless_asked(client, router):
    client.generate("Hi").text()
    assert not sent(router).HasField("parsing")


def test_generate_refuses_unknown_tool_choice(client):
    parsing = OutputParsing([WEATHER], tool_choice="perhaps")  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="auto, none, required"):
        client.generate("Hi", parsing=parsing)


def test_generate_sends_calls_and_reasoning_of_messages(client, router):
    call = ToolCall("call_1", "weather", '{"city": "Oslo"}')
    client.generate(
        [
            Message("user", "Weather?"),
            Message("assistant", "", (call,), reasoning="Look it up."),
            Message("tool", "Rain.", tool_call_id="call_1", name="weather"),
        ]
    ).text()
    _, made, result = sent(router).chat.messages
    assert (made.reasoning, made.tool_calls[0].arguments) == ("Look it up.", call.arguments)
    assert (result.tool_call_id, result.name) == ("call_1", "weather")


def test_chunks_and_completion_have_the_parts(client, router):
    first, second = tokens(0, [5, 6], "<think>..."), tokens(2, [7], "...")
    start = pb.ToolCallStart(index=0, id="call_1", name="weather")
    first.tokens.parts.extend(
        [
            pb.OutputPart(reasoning="Oslo?"),
            pb.OutputPart(text="Let me look."),
            pb.OutputPart(tool_call_start=start),
        ]
    )
    for piece in ('{"city":', ' "Oslo"}'):
        arguments = pb.ToolCallArguments(index=0, json=piece)
        second.tokens.parts.append(pb.OutputPart(tool_call_arguments=arguments))
    router.script = [accepted(), first, second, finished()]
    generation = client.generate("Hi", parsing=OutputParsing([WEATHER]))
    assert [part for chunk in generation for part in chunk.parts] == [
        ReasoningPart("Oslo?"),
        TextPart("Let me look."),
        ToolCallStart(0, "call_1", "weather"),
        ToolCallArguments(0, '{"city":'),
        ToolCallArguments(0, ' "Oslo"}'),
    ]
    (completion,) = generation.completions()
    assert (completion.content, completion.reasoning) == ("Let me look.", "Oslo?")
    assert completion.tool_calls == (ToolCall("call_1", "weather", '{"city": "Oslo"}'),)
