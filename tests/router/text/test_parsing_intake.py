"""Tools and options of parsing in requests over gRPC: checks, prompt and grammar."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.context_length import ContextLength
from baton.errors import InvalidArgumentError
from baton.sampling import GrammarKind
from baton.serving.grpc.message_bounds import check_message
from baton.v1 import inference_pb2 as pb
from baton.v1 import sampling_pb2
from baton_router.call.generate_call import Conversation, Turn
from baton_router.call.output_format import Choice
from baton_router.call.request import Request
from baton_router.text.conversation.template_messages import template_turns
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard, read_model_card
from baton_router.text.request_bounds import RequestLimits, message_bounds
from tests.support.router.calls import call_of
from tests.support.router.scripted import card as tiny
from tests.support.router.written import calling_card, save_calling_model

SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}}}'
WEATHER = pb.Tool(name="weather", description="Of a city.", parameters_json_schema=SCHEMA)
TIME = pb.Tool(name="time")
USER = pb.ChatMessage(role="user", content="Weather?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "caller"
    save_calling_model(folder)
    return folder


@pytest.fixture(scope="module")
def card(folder: Path) -> ModelCard:
    return calling_card(folder)


async def read(
    card: ModelCard, *messages: pb.ChatMessage, grammar: Any = None, **parsing: Any
) -> Request:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=messages or [USER]),
        sampling=sampling_pb2.SamplingParams(grammar=grammar),
        parsing=pb.OutputParsing(**parsing),
    )
    return await Intake(card, RequestLimits(max_tools=4)).read(
        call_of(request), ContextLength(card.max_model_len)
    )


def prompt_of(card: ModelCard, request: Request) -> str:
    return str(card.tokenizer.decode(list(request.token_ids), skip_special_tokens=False))


async def test_intake_describes_tools_and_passes_variables(card):
    variables = json.dumps({"enable_thinking": False})
    request = await read(card, tools=[WEATHER, TIME], template_variables=variables)
    prompt = prompt_of(card, request)
    described = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": json.loads(SCHEMA),
        },
    }
    assert json.dumps(described) in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert request.parsing is not None
    assert request.parsing.options.choice is Choice.AUTO
    assert request.params.grammar is None


@pytest.mark.parametrize(("content", "is_thinking"), [("", True), ("Hello.", False)])
def test_template_reads_reasoning_by_the_names_of_models(content, is_thinking):
    said = Turn("assistant", (content,), reasoning="Hm.")
    (turn,) = template_turns(Conversation([said]))
    assert turn["reasoning_content"] == "Hm."
    assert turn.get("thinking") == ("Hm." if is_thinking else None)


async def test_intake_describes_no_tools_for_choice_none(card):
    request = await read(card, tools=[WEATHER], tool_choice=pb.TOOL_CHOICE_NONE)
    assert "weather" not in prompt_of(card, request)
    assert request.parsing is not None
    assert not request.parsing.options.tools


async def test_intake_renders_calls_results_and_reasoning(card):
    call = pb.ToolCall(id="c", name="weather", arguments='{"city": "Oslo"}')
    made = pb.ChatMessage(role="assistant", tool_calls=[call], reasoning="Look it up.")
    result = pb.ChatMessage(role="tool", content="Rain.", tool_call_id="c", name="weather")
    prompt = prompt_of(card, await read(card, USER, made, result))
    assert "calls weather city=Oslo" in prompt
    assert "Look it up.</think>" in prompt
    assert "## toolRain." in prompt


async def test_prompt_that_ends_in_or_after_reasoning_is_noticed(card):
    for text, is_open, is_over in (
        ("2 + 3?\n<think>\n", True, False),
        ("2 + 3?\n", False, False),
        ("2 + 3?\n<think>\n\n</think>\n", False, True),
    ):
        request = pb.GenerateRequest(text=text, parsing=pb.OutputParsing(reasoning=True))
        read = await Intake(card, RequestLimits()).read(
            call_of(request), ContextLength(card.max_model_len)
        )
        assert read.parsing is not None
        assert read.parsing.options.is_reasoning_open == is_open
        assert read.parsing.options.is_reasoning_over == is_over


FORCED: dict[str, dict[str, Any]] = {
    "required": {"tools": [TIME], "tool_choice": pb.TOOL_CHOICE_REQUIRED},
    "named": {"tools": [TIME], "tool_choice": pb.TOOL_CHOICE_NAMED, "tool_name": "time"},
    "strict": {"tools": [pb.Tool(name="time", strict=True)]},
    "one call": {"tools": [TIME], "one_tool_call": True},
    "budget": {"reasoning": True, "max_reasoning_tokens": 4},
}


@pytest.mark.parametrize("case", FORCED)
async def test_intake_makes_grammar_of_what_is_forced(card, case):
    grammar = (await read(card, **FORCED[case])).params.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.EBNF


async def test_schema_applies_after_reasoning(card):
    own = sampling_pb2.Grammar(json_schema='{"type": "object"}')
    grammar = (await read(card, grammar=own, reasoning=True)).params.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.EBNF
    alone = (await read(card, grammar=own)).params.grammar
    assert alone is not None
    assert alone.kind is GrammarKind.JSON_SCHEMA


@pytest.mark.parametrize("parsing", [{"reasoning": True}, {"tools": [TIME]}])
async def test_regex_with_reasoning_or_tools_is_refused(card, parsing):
    with pytest.raises(InvalidArgumentError, match="expected a JSON schema") as raised:
        await read(card, grammar=sampling_pb2.Grammar(regex="a+"), **parsing)
    assert raised.value.field == "sampling.grammar.regex"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no name": ({"tools": [pb.Tool()]}, "tools[0].name", "letters"),
    "a name with a space": ({"tools": [pb.Tool(name="a b")]}, "tools[0].name", "letters"),
    "a long name": ({"tools": [pb.Tool(name="a" * 129)]}, "tools[0].name", "1 to 128"),
    "one name twice": ({"tools": [TIME, TIME]}, "tools[1].name", "another"),
    "too many": ({"tools": [TIME] * 5}, "tools", "at most 4"),
    "too large": ({"tools": [pb.Tool(name="a", description="x" * 10_001)]}, "tools", "10000"),
    "no JSON": (
        {"tools": [pb.Tool(name="a", parameters_json_schema="{")]},
        "tools[0].parameters_json_schema",
        "not JSON",
    ),
    "no object": (
        {"tools": [pb.Tool(name="a", parameters_json_schema="[]")]},
        "tools[0].parameters_json_schema",
        "object",
    ),
    "not a number": (
        {"tools": [pb.Tool(name="a", parameters_json_schema='{"minimum": NaN}')]},
        "tools[0].parameters_json_schema",
        "NaN",
    ),
    "deep": (
        {"tools": [pb.Tool(name="a", parameters_json_schema='{"a":' * 1999)]},
        "tools[0].parameters_json_schema",
        "JSON",
    ),
    "a choice without tools": (
        {"tool_choice": pb.TOOL_CHOICE_REQUIRED},
        "tool_choice",
        "at least 1 tool",
    ),
    "an unknown choice": ({"tool_choice": 77}, "tool_choice", "77"),
    "an unknown tool": (
        {"tools": [TIME], "tool_choice": pb.TOOL_CHOICE_NAMED, "tool_name": "clock"},
        "tool_name",
        "'clock'",
    ),
    "a name without its choice": (
        {"tools": [TIME], "tool_name": "time"},
        "tool_name",
        "TOOL_CHOICE_NAMED",
    ),
    "variables that are none": ({"template_variables": "3"}, "template_variables", "object"),
    "a variable of the renderer": (
        {"template_variables": '{"tools": []}'},
        "template_variables.tools",
        "not for clients",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_intake_refuses_parsing_by_name_of_field(card, case):
    parsing, field, words = REFUSED[case]
    with pytest.raises(InvalidArgumentError, match=words) as raised:
        await read(card, **parsing)
    assert raised.value.field == f"parsing.{field}"


async def test_intake_refuses_tools_that_template_cannot_take():
    with pytest.raises(InvalidArgumentError, match="its chat template takes no tools"):
        await read(tiny(), tools=[TIME])


async def test_intake_refuses_tools_of_unknown_format(folder):
    with pytest.raises(InvalidArgumentError, match="--tool-call-parser"):
        await read(calling_card(folder, None), tools=[TIME])


async def test_intake_refuses_budget_without_reasoning_format(folder):
    card = read_model_card(str(folder), tool_format="hermes", reasoning_format=None)
    with pytest.raises(InvalidArgumentError, match="--reasoning-parser"):
        await read(card, max_reasoning_tokens=4)


def test_message_bounds_allow_more_ids_to_embed_than_to_continue():
    bounds = message_bounds(
        100, RequestLimits(max_prompt_bytes=1000, max_inputs=3, max_input_tokens=200)
    )
    ids = pb.TokenIds(ids=[5] * 60)
    taken = pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=ids)] * 3)
    check_message(taken.SerializeToString(), taken.DESCRIPTOR, bounds)
    many = pb.TokenIds(ids=[5] * 101)
    for message in (
        pb.GenerateRequest(token_ids=many),
        pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=many)] * 2),
        pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")] * 4),
        pb.ScoreRequest(pairs=[pb.TextPair(first="a")] * 4),
    ):
        with pytest.raises(InvalidArgumentError, match="too many elements"):
            check_message(message.SerializeToString(), message.DESCRIPTOR, bounds)


def test_message_bounds_count_tools_and_calls():
    bounds = message_bounds(100, RequestLimits(max_tools=4))
    tools = pb.GenerateRequest(parsing=pb.OutputParsing(tools=[TIME] * 5))
    calls = pb.ChatMessage(tool_calls=[pb.ToolCall(id="c")] * 101)
    many = pb.GenerateRequest(chat=pb.Chat(messages=[calls]))
    for message in (tools, many):
        with pytest.raises(InvalidArgumentError, match="too many elements"):
            check_message(message.SerializeToString(), message.DESCRIPTOR, bounds)
