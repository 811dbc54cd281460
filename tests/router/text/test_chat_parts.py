"""Tool calls and reasoning of chat completions, as OpenAI's client sees them."""

import asyncio
import json
from typing import Any

import openai
import pytest

from baton.errors import InvalidArgumentError
from baton.v1 import inference_pb2 as pb
from baton_router.text.model_card import ModelCard
from tests.support.model_outputs import WRITTEN
from tests.support.router.front import front_of, openai_client_of
from tests.support.router.scripted import Cue, Worker
from tests.support.router.written import (
    NOW,
    OSLO,
    THOUGHT,
    calling_card,
    ids_of,
    save_calling_model,
    writing,
)

USER: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
WEATHER = {
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TIME = {"name": "time", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": f} for f in (WEATHER, TIME)]
CALLS = [("weather", '{"city": "Oslo 漢"}'), ("time", "{}")]


async def ask(model: ModelCard, text: Any, size: int = 3, **body: Any) -> Any:
    """Returns the answer, or the chunks of a stream, when the model writes `text`."""
    reason = body.pop("reason", pb.FINISH_REASON_END_OF_SEQUENCE)
    given = {"messages": USER, "tools": TOOLS, "max_tokens": 200, **body}
    async with front_of(*writing(text, size, reason, model), model=model) as front:
        answer = await openai_client_of(front).chat.completions.create(model=model.name, **given)
        return [chunk async for chunk in answer] if given.get("stream") else answer


def joined(chunks: list[Any]) -> dict[str, Any]:
    """Adds up the deltas of a stream with one choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += getattr(delta, "reasoning_content", "") or ""
            message["reason"] = choice.finish_reason or message["reason"]
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(message["calls"])
                    assert call.type == "function"
                    message["calls"].append([call.id, call.function.name, ""])
                message["calls"][call.index][2] += call.function.arguments
    return message


def whole(answer: Any) -> dict[str, Any]:
    (choice,) = answer.choices
    calls = choice.message.tool_calls or ()
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", ""),
        "calls": [[c.id, c.function.name, c.function.arguments] for c in calls],
        "reason": choice.finish_reason,
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "calls": [tuple(call[1:]) for call in message["calls"]]}


async def test_chat_answer_has_calls_and_no_content(model):
    answer = await ask(model, f"{OSLO}\n{NOW}")
    (choice,) = answer.choices
    assert choice.message.content is None
    assert without_ids(whole(answer))["calls"] == CALLS
    assert choice.finish_reason == "tool_calls"
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(len(one) == 29 and one.startswith("call_") for one in ids)


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
async def test_stream_of_calls_alone_never_has_content(model, choice):
    chunks = await ask(model, f"{OSLO}\n{NOW}", tool_choice=choice, stream=True)
    contents = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    if choice == "none":
        assert contents[0] == ""
    else:
        assert {*contents} == {None}


@pytest.mark.symptom(
    "vllm#31501",
    there="several tokens in one message lose arguments of a call",
    here="Streams the same parts, however many tokens arrive together.",
)
@pytest.mark.parametrize("size", [1, 3, 500])
@pytest.mark.parametrize(
    "text",
    [f"{THOUGHT}Let me look.\n{OSLO}\n{NOW}", f"{THOUGHT}It rains.", "It <tool rains. <thi"],
    ids=["reasoning, text and calls", "reasoning and text", "text alone"],
)
async def test_streamed_chat_deltas_add_up_to_whole_answer(model, text, size):
    expected = without_ids(whole(await ask(model, text)))
    chunks = await ask(model, text, size, stream=True)
    assert without_ids(joined(chunks)) == expected


async def test_stream_has_reasoning_while_model_is_still_thinking(model):
    """The model thinks on only once a part of its thought is written to the client."""
    cue = Cue()
    prefill, decode = writing(f"{THOUGHT}It rains.", 1, model=model)
    decode.script.insert(len(ids_of("<think>\nThe user asks for", model)), cue)

    def note(part: bytes) -> None:
        if b"user" in part:
            cue.event.set()

    body = {"messages": USER, "max_tokens": 200, "stream": True}
    async with asyncio.timeout(30), front_of(prefill, decode, model=model, on_body=note) as front:
        answer = await openai_client_of(front).chat.completions.create(model=model.name, **body)
        message = joined([chunk async for chunk in answer])
    assert message["reasoning"] == "The user asks for Oslo: é 漢."


async def test_chat_splits_reasoning_from_content(model):
    answer = await ask(model, f"{THOUGHT}It rains.", tools=[])
    message = answer.choices[0].message
    assert message.content == "It rains."
    assert message.reasoning_content == "The user asks for Oslo: é 漢."
    assert answer.choices[0].finish_reason == "stop"
    num_tokens = len(ids_of("\nThe user asks for Oslo: é 漢.\n", model))  # between the marks
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_tokens


@pytest.mark.symptom(
    "vllm#20663, sglang#15169",
    there="reasoning is lost where a call is forced",
    here="Returns it before the call.",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_forced_call_keeps_the_reasoning_before_it(model, choice, stream):
    answer = await ask(model, f"{THOUGHT}{OSLO}", tool_choice=choice, stream=stream)
    message = without_ids(joined(answer) if stream else whole(answer))
    assert message["reasoning"] == "The user asks for Oslo: é 漢."
    assert message["calls"] == CALLS[:1]


async def test_chat_without_formats_shows_what_model_wrote():
    answer = await ask_tiny(f"{THOUGHT}{OSLO}")
    assert answer.choices[0].message.content == f"{THOUGHT}{OSLO}"


async def ask_tiny(text: str) -> Any:
    async with front_of(*writing(text)) as front:
        return await openai_client_of(front).chat.completions.create(
            model="tiny", messages=USER, max_tokens=200
        )


@pytest.mark.symptom(
    "vllm#53269",
    there="an answer that is cut ends with `tool_calls`",
    here="Ends it with `length`.",
)
async def test_cut_off_answer_ends_by_length_with_its_rest(model):
    text = f"{OSLO}\nIt <tool_c"
    for stream in (False, True):
        answer = await ask(model, text, stream=stream, reason=pb.FINISH_REASON_LENGTH)
        message = joined(answer) if stream else whole(answer)
        assert message["reason"] == "length"
        assert message["content"].strip() == "It <tool_c"
        assert len(message["calls"]) == 1


@pytest.mark.symptom(
    "vllm#47903",
    there="a call that is cut by `max_tokens` shows its marks as text",
    here="Returns the call in part, or not at all; marks are never text.",
)
@pytest.mark.parametrize(
    ("text", "calls", "reason"),
    [
        (OSLO[:30], [], "length"),
        (OSLO[:60], [("weather", '{"city": "Oslo ')], "length"),
        (OSLO.replace("weather", "rain"), [("rain", '{"city": "Oslo 漢"}')], "tool_calls"),
        ('<tool_call>{"name": "time"}</tool_call>', [("time", "{}")], "tool_calls"),
        (f"<think>I call {NOW} or\n{OSLO}", [("weather", '{"city": "Oslo 漢"}')], "tool_calls"),
    ],
    ids=["cut before arguments", "cut within them", "unknown", "no arguments", "open thought"],
)
async def test_marks_of_a_call_are_never_content(model, text, calls, reason):
    ending = pb.FINISH_REASON_LENGTH if reason == "length" else pb.FINISH_REASON_END_OF_SEQUENCE
    for stream in (False, True):
        answer = await ask(model, text, 1, stream=stream, reason=ending)
        message = without_ids(joined(answer) if stream else whole(answer))
        assert (message["content"], message["calls"]) == ("", calls)
        assert message["reason"] == reason


@pytest.mark.parametrize("way", ["json", "llama3-json", "pythonic"])
async def test_call_without_marks_in_an_open_thought_is_made(way, tmp_path):
    save_calling_model(tmp_path / "caller")
    model = calling_card(tmp_path / "caller", WRITTEN[way].format_name)
    written = WRITTEN[way].write([("weather", {"city": "Oslo"})], "")
    for stream in (False, True):
        answer = await ask(model, f"<think>\nI call\n{written}", 1, stream=stream)
        message = without_ids(joined(answer) if stream else whole(answer))
        assert [(name, json.loads(of)) for name, of in message["calls"]] == [
            ("weather", {"city": "Oslo"})
        ]
        assert (message["content"], message["reason"]) == ("", "tool_calls")
        assert message["reasoning"].startswith("I call")


async def test_chat_scores_every_token_of_a_call(model):
    for stream in (False, True):
        answer = await ask(model, OSLO, logprobs=True, stream=stream)
        choices = [c.choices[0] for c in answer] if stream else answer.choices
        scored = [t.token for c in choices if c.logprobs for t in c.logprobs.content]
        assert len(scored) == len(ids_of(OSLO, model))


async def test_choice_none_describes_no_tools_and_parses_none(model):
    answer = await ask(model, OSLO, tool_choice="none")
    assert answer.choices[0].message.content == OSLO
    assert answer.choices[0].message.tool_calls is None


async def prompt_of(model: ModelCard, **body: Any) -> tuple[str, Any]:
    """Returns the prompt that workers get, and its sampling parameters."""
    workers = writing("It rains.")
    given = {"messages": USER, "max_tokens": 200, **body}
    async with front_of(*workers, model=model) as front:
        await openai_client_of(front).chat.completions.create(model=model.name, **given)
    (request,) = workers[0].requests
    text = model.tokenizer.decode(list(request.token_ids), skip_special_tokens=False)
    return text, request.sampling


HISTORY: list[Any] = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Look it up.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
]


async def test_template_reads_calls_and_reasoning_of_history(model):
    text, _ = await prompt_of(model, messages=HISTORY)
    assert "<think>Look it up.</think>" in text
    assert "calls weather city=Oslo" in text


async def test_template_gets_effort_and_may_turn_thinking_off(model):
    text, _ = await prompt_of(model, reasoning_effort="high")
    assert "effort: high" in text
    text, _ = await prompt_of(model, reasoning_effort="none")
    assert text.endswith("<think>\n\n</think>\n\n")
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    text, _ = await prompt_of(model, extra_body=kwargs)
    assert text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": {**WEATHER, "strict": True}}]},
        {"extra_body": {"thinking_token_budget": 5}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}},
            }
        },
    ],
    ids=["required", "named", "one", "strict", "budget", "schema"],
)
async def test_chat_forces_outputs_by_grammar(model, body):
    _, sampling = await prompt_of(model, **{"tools": TOOLS, **body})
    assert sampling.grammar.ebnf


async def test_free_choice_among_tools_needs_no_grammar(model):
    _, sampling = await prompt_of(model, tools=TOOLS)
    assert not sampling.HasField("grammar")


async def test_allowed_tools_are_the_only_ones_described(model):
    named = {"type": "function", "function": {"name": "time"}}
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    text, sampling = await prompt_of(model, tools=TOOLS, tool_choice=choice)
    assert '"time"' in text
    assert "Of a city." not in text
    assert sampling.grammar.ebnf


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a tool without a name": (
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
        "letters",
    ),
    "two of one name": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "another"),
    "a call without tools": ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
    "an unknown tool": (
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        "tool_choice",
        "clock",
    ),
    "an argument of the renderer": (
        {"extra_body": {"chat_template_kwargs": {"tools": []}}},
        "chat_template_kwargs.tools",
        "not for clients",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_chat_refuses_tools_by_name_of_field(model, case):
    body, field, words = REFUSED[case]
    with pytest.raises(openai.BadRequestError, match=words) as raised:
        await ask(model, "It rains.", **body)
    assert raised.value.param == field


async def test_template_without_tools_is_refused_with_reason():
    async with front_of(*writing("It rains.")) as front:
        with pytest.raises(openai.BadRequestError, match="chat template takes no tools") as raised:
            await openai_client_of(front).chat.completions.create(
                model="tiny", messages=USER, tools=TOOLS
            )
    assert raised.value.param == "tools"


async def test_unknown_tool_format_is_refused_with_setting(model, tmp_path):
    folder = tmp_path / "caller"
    save_calling_model(folder)
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        await ask(calling_card(folder, None), "It rains.")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.grammar.ebnf", "tools"),
        (
            "sampling.grammar[time].properties.zone.pattern",
            "tools[2].function.parameters.properties.zone.pattern",
        ),
    ],
)
async def test_schema_that_workers_refuse_is_named_as_tools(model, field, param):
    refusal = InvalidArgumentError(field, "is not understood")
    workers = [Worker(role, role, [refusal]) for role in ("prefill", "decode")]
    async with front_of(*workers, model=model) as front:
        with pytest.raises(openai.BadRequestError, match="is not understood") as raised:
            await openai_client_of(front).chat.completions.create(
                model=model.name,
                messages=USER,
                tools=[TOOLS[0], {"type": "custom"}, TOOLS[1]],
                tool_choice="required",
            )
    assert raised.value.param == param
