"""Tool calls and reasoning of a cluster: forced by grammar, parsed by the router, over gRPC and
HTTP, and the same when a decode worker is killed in the middle of one."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anthropic
import openai
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import (
    AsyncClient,
    Completion,
    Message,
    OutputParsing,
    SamplingParams,
    Tool,
    ToolCallArguments,
)
from baton.client.types import FinishReason
from baton.errors import InvalidArgumentError
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.cluster.wide import HANDOFFS, name_of, restored
from tests.support.router.written import save_calling_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FORECAST = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {
            "type": "array",
            "items": {"enum": ["rain", "snow", "sun"]},
            "minItems": 40,
            "maxItems": 40,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST_TOOL = Tool("forecast", "Stores a forecast.", FORECAST)
TIME = Tool("time", "Tells the time.", {"type": "object", "properties": {}})
CHAT = [Message("user", "Store the forecast of Oslo.")]
SEEDED = SamplingParams(max_tokens=600, temperature=0.9, seed=7)
# The model has not learned to end its reasoning.
FORCED = OutputParsing([FORECAST_TOOL, TIME], tool_name="forecast", max_reasoning_tokens=4)


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    """Two workers of each role, whose model has a template with tools."""
    with TemporaryDirectory(prefix="baton-model-") as name:
        folder = Path(name) / "caller"
        save_calling_model(folder)
        with LocalCluster(
            str(folder),
            num_prefill=2,
            num_decode=2,
            http_port=0,
            worker_flags={"num_blocks": 1024, "drain_timeout_s": 1.0},
            router_flags={
                **HANDOFFS,
                "tool_call_parser": "hermes",
                "reasoning_parser": "think",
                "http_reasoning_field": "reasoning",
                "http_excess_max_tokens": "refuse",
            },
        ) as cluster:
            yield cluster


@pytest.fixture
def calling(running: LocalCluster) -> LocalCluster:
    """That cluster, made whole after whatever an earlier test did to it."""
    return restored(running)


@pytest.fixture
async def grpc_client(calling: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(calling.address) as open_client:
        yield open_client


@pytest.fixture
async def ai(calling: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{calling.http_address}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


def check_forecast(arguments: str) -> None:
    given = json.loads(arguments)
    assert given["city"] in ("Oslo", "Rome")
    assert len(given["days"]) == 40
    assert set(given["days"]) <= {"rain", "snow", "sun"}


async def completed(client: AsyncClient, parsing: OutputParsing, **others: Any) -> Completion:
    generation = client.generate(CHAT, SEEDED, parsing=parsing, **others)
    (completion,) = await generation.completions()
    return completion


async def test_named_tool_is_called_by_its_schema_over_grpc(grpc_client, calling):
    completion = await completed(grpc_client, FORCED)
    (call,) = completion.tool_calls
    assert call.name == "forecast", completion.text
    check_forecast(call.arguments)
    assert completion.finished.reason is FinishReason.END_OF_SEQUENCE
    assert call.id.startswith("call_")
    await until_nothing_is_held(calling)


async def test_required_call_over_http_is_the_same_in_pieces(ai):
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": "forecast", "description": "Stores.", "parameters": FORECAST},
        }
    ]
    asked: dict[str, Any] = {
        "model": "caller",
        "messages": [{"role": "user", "content": "Store the forecast."}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 5,
        "temperature": 0.9,
        "extra_body": {"thinking_token_budget": 4},
    }
    answer = await ai.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    check_forecast(call.function.arguments)
    names, pieces, reason = [], [], None
    async for chunk in await ai.chat.completions.create(**asked, stream=True):
        for one in chunk.choices[0].delta.tool_calls or ():
            assert one.function is not None
            names += [one.function.name] if one.function.name else []
            pieces.append(one.function.arguments)
        reason = chunk.choices[0].finish_reason or reason
    assert (names, reason) == (["forecast"], "tool_calls")
    assert "".join(map(str, pieces)) == call.function.arguments
    assert len(pieces) > 5


async def test_settings_name_reasoning_and_refuse_excess_tokens(ai, grpc_client):
    thought = (await grpc_client.tokenize("<think>")).token_ids[0]
    asked: dict[str, Any] = {
        "model": "caller",
        "messages": [{"role": "user", "content": "What is the time?"}],
        "tools": [{"type": "function", "function": {"name": "time"}}],
        "tool_choice": "required",
        "extra_body": {"thinking_token_budget": 4},
    }
    answer = await ai.chat.completions.create(
        **asked, max_tokens=100, logit_bias={str(thought): 100}
    )
    found = answer.choices[0].message.model_dump(exclude_none=True)
    assert found["reasoning"]
    assert "reasoning_content" not in found
    with pytest.raises(openai.BadRequestError, match="is 1000000") as refused:
        await ai.chat.completions.create(**asked, max_tokens=10**6)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")


@pytest.mark.symptom(
    "oh-my-pi#2652",
    there="one schema that no grammar can follow fails a turn with many tools",
    here="Leaves out that part of the schema; refuses a strict tool, and names the tool.",
)
async def test_unfollowed_schema_is_named_if_strict_and_else_left_out(ai):
    email = {"type": "string", "pattern": "^(?!x).+$"}
    parameters = {"type": "object", "properties": {"email": email}, "additionalProperties": False}
    functions: list[Any] = [{"name": "time"}, {"name": "mail", "parameters": parameters}]
    tools: list[Any] = [{"type": "function", "function": f} for f in functions]
    asked: dict[str, Any] = {"model": "caller", "max_tokens": 60, "tool_choice": "required"}
    asked |= {"messages": [{"role": "user", "content": "Mail."}], "tools": tools}
    answer = await ai.chat.completions.create(**asked, extra_body={"enable_thinking": False})
    assert answer.choices[0].message.tool_calls
    functions[1]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="in the strict tool 'mail': look-around") as e:
        await ai.chat.completions.create(**asked)
    assert e.value.param == "tools[1].function.parameters.properties.email.pattern"


async def test_killed_decode_worker_leaves_the_call_as_it_was(grpc_client, calling):
    undisturbed = await completed(grpc_client, FORCED, request_id="the same")
    await until_nothing_is_held(calling)
    generation = grpc_client.generate(CHAT, SEEDED, parsing=FORCED, request_id="the same")
    placement = (await generation.wait_accepted()).placement
    num_pieces, is_killed = 0, False
    async for chunk in generation:
        num_pieces += sum(isinstance(part, ToolCallArguments) for part in chunk.parts)
        if num_pieces > 5 and not is_killed:
            is_killed = True
            calling.kill(name_of(calling, placement.decode_worker))
    (completion,) = await generation.completions()
    assert is_killed
    assert completion.finished.usage.num_migrations >= 1
    assert completion.tool_calls == undisturbed.tool_calls
    check_forecast(completion.tool_calls[0].arguments)
    assert completion.token_ids == undisturbed.token_ids


async def test_budget_ends_reasoning_before_the_call(grpc_client):
    parsing = OutputParsing(
        [TIME], tool_choice="required", one_tool_call=True, max_reasoning_tokens=8
    )
    prompt = "Question: 5 + 7?\n<think>\n"
    generation = grpc_client.generate(prompt, SEEDED, parsing=parsing)
    (completion,) = await generation.completions()
    assert completion.reasoning
    assert [call.name for call in completion.tool_calls] == ["time"]
    assert completion.content == ""


async def test_template_without_tools_is_refused_over_grpc(client):
    """`client`: of a cluster whose model has a template without tools."""
    with pytest.raises(InvalidArgumentError, match="chat template takes no tools") as raised:
        await client.generate(CHAT, parsing=OutputParsing([TIME])).text()
    assert raised.value.field == "parsing.tools"


async def test_required_calls_of_messages_make_a_loop(calling):
    asked: dict[str, Any] = {
        "model": "caller",
        "max_tokens": 600,
        "tools": [{"name": "forecast", "description": "Stores.", "input_schema": FORECAST}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0.0},
        "thinking": {"type": "enabled", "budget_tokens": 4},
    }
    question: Any = {"role": "user", "content": "Store the forecast."}
    async with anthropic.AsyncAnthropic(
        base_url=calling.http_address, api_key="any", max_retries=0
    ) as claude:
        first = await claude.messages.create(messages=[question], **asked)
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert (call.type, call.name) == ("tool_use", "forecast")
        check_forecast(json.dumps(call.input))
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Stored."}
        messages: list[Any] = [
            question,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        whole = await claude.messages.create(messages=messages, **asked)
        async with claude.messages.stream(messages=messages, **asked) as stream:
            pieces = [event.partial_json async for event in stream if event.type == "input_json"]
            final = await stream.get_final_message()
    assert len(pieces) > 5
    assert final.content[-1].input == whole.content[-1].input
    check_forecast(json.dumps(final.content[-1].input))
