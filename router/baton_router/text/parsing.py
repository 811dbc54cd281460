"""Tools and parsing of outputs: validation, and what templates and grammars make of them.

Every rejection is an `InvalidArgumentError` that names the field and the bound.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn

from baton.errors import InvalidArgumentError
from baton.sampling import (
    MAX_GRAMMAR_BYTES,
    MAX_STOP_TOKEN_IDS,
    Grammar,
    GrammarKind,
    SamplingParams,
)
from baton.v1 import inference_pb2 as pb
from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.call.request_parsing import RequestParsing
from baton_router.text.images.image_source import GivenClip, GivenImage
from baton_router.text.model_card import ModelCard
from baton_router.text.prompt_images import given_image

_MAX_NAME_CHARS = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{_MAX_NAME_CHARS}}}")
# Names of the renderer's own arguments.
_RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversations",
    "documents",
    "messages",
    "return_assistant_tokens_mask",
    "tools",
}
_CHOICES = {
    pb.TOOL_CHOICE_UNSPECIFIED: Choice.AUTO,
    pb.TOOL_CHOICE_AUTO: Choice.AUTO,
    pb.TOOL_CHOICE_NONE: Choice.NONE,
    pb.TOOL_CHOICE_REQUIRED: Choice.REQUIRED,
    pb.TOOL_CHOICE_NAMED: Choice.NAMED,
}
# Tokens with which models end a call. Some checkpoints do not list them as ends of an answer.
_CALL_ENDS = ("<|call|>", "<|eom_id|>")


def check_variables(variables: Mapping[str, Any], field: str) -> None:
    """Refuses variables of the chat template that are not for clients to set."""
    for name in sorted(_RESERVED & variables.keys()):
        raise InvalidArgumentError(f"{field}.{name}", "is not for clients to set")


def template_variables(parsing: pb.OutputParsing) -> dict[str, Any]:
    """Returns the client's variables of the chat template."""
    if not parsing.template_variables:
        return {}
    field = "parsing.template_variables"
    variables = _json_object(parsing.template_variables, field)
    check_variables(variables, field)
    return variables


def template_tools(parsing: pb.OutputParsing) -> list[dict[str, Any]]:
    """Returns the tools that the chat template describes, as OpenAI's API has them."""
    if parsing.tool_choice == pb.TOOL_CHOICE_NONE:
        return []
    return [_template_tool(at, tool) for at, tool in enumerate(parsing.tools)]


def _template_tool(at: int, tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json_schema:
        function["parameters"] = _json_object(
            tool.parameters_json_schema, f"parsing.tools[{at}].parameters_json_schema"
        )
    return {"type": "function", "function": function}


def check_template_takes_tools(card: ModelCard) -> None:
    """Refuses tools of which the model would not be told."""
    if card.chat_template is not None and not card.template_takes_tools:
        raise InvalidArgumentError(
            "parsing.tools",
            f"cannot be described to model {card.name!r}: its chat template takes no tools. Leave "
            "them out, or serve a model whose template does",
        )


def template_turns(chat: pb.Chat, *, needs_parts: bool = False) -> list[dict[str, Any]]:
    """Returns the messages as chat templates read them. `needs_parts`: as
    `ModelCard.template_needs_parts`."""
    return [_template_turn(message, needs_parts) for message in chat.messages]


def template_content(parts: Sequence[str | None], needs_parts: bool) -> str | list[dict[str, Any]]:
    """Returns the content of a message, whose parts are texts and None for an image or a clip, as
    chat templates read it."""
    if needs_parts or None in parts:
        return [
            {"type": "image"} if part is None else {"type": "text", "text": part} for part in parts
        ]
    return "\n".join(part for part in parts if part is not None)


def with_frames(
    turns: Sequence[Mapping[str, Any]], num_frames: Iterable[int]
) -> list[Mapping[str, Any]]:
    """Returns the messages with an image for each frame of a clip.

    Args:
        num_frames: of each image and clip, in order.
    """
    numbers = iter(num_frames)

    def repeated(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [part] * next(numbers) if part["type"] == "image" else [part]

    return [
        {**turn, "content": list(chain.from_iterable(map(repeated, turn["content"])))}
        if isinstance(turn["content"], list)
        else turn
        for turn in turns
    ]


def images_of(chat: pb.Chat) -> list[GivenImage]:
    """Returns the images and clips of a conversation, in order. Raises `InvalidArgumentError` for a
    message with both content and parts, and for an empty part."""
    images = []
    for at, message in enumerate(chat.messages):
        field = f"input.chat.messages[{at}]"
        if message.content and message.parts:
            raise InvalidArgumentError(f"{field}.parts", "is set beside content; give one of them")
        for part_at, part in enumerate(message.parts):
            kind = part.WhichOneof("part")
            if kind is None:
                raise InvalidArgumentError(
                    f"{field}.parts[{part_at}]", "is empty; set text, image or clip"
                )
            if kind == "image":
                images.append(given_image(part.image, f"{field}.parts[{part_at}].image"))
            elif kind == "clip":
                images.append(given_image(part.clip, f"{field}.parts[{part_at}].clip", GivenClip))
    return images


def _template_turn(message: pb.ChatMessage, needs_parts: bool) -> dict[str, Any]:
    parts: Sequence[str | None] = [message.content]
    if message.parts:
        parts = [part.text if part.HasField("text") else None for part in message.parts]
    turn: dict[str, Any] = {"role": message.role, "content": template_content(parts, needs_parts)}
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    add_reasoning(turn, message.reasoning)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def add_reasoning(turn: dict[str, Any], reasoning: str) -> None:
    """Adds the reasoning of an earlier turn, if any, under the names that templates read it by."""
    if not reasoning:
        return
    turn["reasoning_content"] = reasoning
    # The name of gpt-oss's template, which refuses it beside content: that it takes for reasoning.
    if not turn["content"]:
        turn["thinking"] = reasoning


def call_arguments(written: str) -> object:
    """Parses arguments that a model wrote as JSON; returns them unchanged if they are invalid."""
    try:
        return json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written


def texts_of(chat: pb.Chat) -> Iterator[str]:
    """Yields all texts of a conversation."""
    for message in chat.messages:
        yield from (message.role, message.content, message.reasoning)
        yield from (message.name, message.tool_call_id)
        yield from (part.text for part in message.parts)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)


def parsing_options(
    parsing: pb.OutputParsing, card: ModelCard, max_tools: int, max_bytes: int
) -> ParsingOptions:
    """Validates and returns the options, for a prompt that does not end within reasoning.

    Args:
        max_tools: maximum number of tools.
        max_bytes: maximum bytes of all their texts.
    """
    tools = _tools(parsing, max_tools, max_bytes)
    choice = _CHOICES.get(parsing.tool_choice)
    if choice is None:
        raise InvalidArgumentError(
            "parsing.tool_choice",
            f"is {parsing.tool_choice}; must be one of the values of ToolChoice",
        )
    if choice in (Choice.REQUIRED, Choice.NAMED) and not tools:
        raise InvalidArgumentError(
            "parsing.tool_choice", "is a call, but there are no tools; expected at least 1 tool"
        )
    names = {tool.name for tool in tools}
    if choice is Choice.NAMED and parsing.tool_name not in names:
        raise InvalidArgumentError(
            "parsing.tool_name", f"is {parsing.tool_name!r}; must be the name of one of the tools"
        )
    if parsing.tool_name and choice is not Choice.NAMED:
        raise InvalidArgumentError(
            "parsing.tool_name", "is set; expected only with TOOL_CHOICE_NAMED"
        )
    if tools and choice is not Choice.NONE and not card.tool_format:
        raise InvalidArgumentError(
            "parsing.tools",
            f"cannot be called by model {card.name!r}: the router does not know how it "
            "writes calls. Start the router with --tool-call-parser",
        )
    limit = parsing.max_reasoning_tokens if parsing.HasField("max_reasoning_tokens") else None
    if limit is not None and not card.reasoning_format:
        raise InvalidArgumentError(
            "parsing.max_reasoning_tokens",
            f"cannot be held to by model {card.name!r}: the router does not know how it "
            "reasons. Start the router with --reasoning-parser",
        )
    return ParsingOptions(
        () if choice is Choice.NONE else tools,
        choice,
        parsing.tool_name,
        parsing.one_tool_call,
        parsing.reasoning,
        limit,
    )


def _tools(parsing: pb.OutputParsing, max_tools: int, max_bytes: int) -> tuple[Tool, ...]:
    if len(parsing.tools) > max_tools:
        raise InvalidArgumentError(
            "parsing.tools", f"has {len(parsing.tools)} tools; at most {max_tools} are taken"
        )
    size = sum(len(t.description) + len(t.parameters_json_schema) for t in parsing.tools)
    if size > max_bytes:
        raise InvalidArgumentError(
            "parsing.tools", f"have {size} characters; at most {max_bytes} are taken"
        )
    tools: dict[str, Tool] = {}
    for at, tool in enumerate(parsing.tools):
        field = f"parsing.tools[{at}]"
        if not _NAME.fullmatch(tool.name):
            raise InvalidArgumentError(
                f"{field}.name",
                f"is {tool.name[:_MAX_NAME_CHARS]!r}; must be 1 to {_MAX_NAME_CHARS} letters, "
                "digits, underscores, dots and hyphens",
            )
        if tool.name in tools:
            raise InvalidArgumentError(f"{field}.name", f"is {tool.name!r}, as that of another one")
        schema = None
        if tool.parameters_json_schema:
            schema = _json_object(tool.parameters_json_schema, f"{field}.parameters_json_schema")
        tools[tool.name] = Tool(tool.name, schema, tool.strict)
    return tuple(tools.values())


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgumentError(field, f"is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, "is no JSON object; must be one")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def request_parsing(card: ModelCard, options: ParsingOptions, prompt: str) -> RequestParsing:
    """Returns the parsing of the outputs of a request with this rendered prompt, of which the last
    characters are enough."""
    output_format = card.output_format
    kept = {card.tokenizer.token_to_id(token): token for token in output_format.kept_tokens}
    return RequestParsing(
        output_format,
        replace(
            options,
            is_reasoning_open=output_format.opens_reasoning(prompt),
            is_reasoning_over=output_format.closes_reasoning(prompt),
        ),
        {token_id: token for token_id, token in kept.items() if token_id is not None},
        has_short_ids=card.tool_format == "mistral",
    )


def constrained(params: SamplingParams, card: ModelCard, parsing: RequestParsing) -> SamplingParams:
    """Returns the parameters with what makes outputs keep to the format."""
    options = parsing.options
    if options.tools and not params.ignore_eos:
        params = _with_call_ends(params, card)
    own = params.grammar
    if own is None:
        text = parsing.format.grammar(options)
    elif not options.tools and not (options.splits_reasoning and card.reasoning_format):
        return params
    elif own.kind is GrammarKind.JSON_SCHEMA:
        text = parsing.format.grammar(options, own.text)
    else:
        what = "parsing.tools" if options.tools else "parsing.reasoning"
        raise InvalidArgumentError(
            f"sampling.grammar.{own.kind.value}",
            f"cannot be combined with {what}; expected a JSON schema. Leave out one of both",
        )
    if text is None:
        return params
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidArgumentError(
            "parsing.tools",
            f"make a grammar of {len(text.encode())} bytes; at most {MAX_GRAMMAR_BYTES} are taken. "
            "Give fewer tools, or smaller schemas",
        )
    return replace(params, grammar=Grammar(GrammarKind.EBNF, text))


def _with_call_ends(params: SamplingParams, card: ModelCard) -> SamplingParams:
    """Returns the parameters with the tokens that end a call as stop tokens, if they do not end an
    answer of this model anyway."""
    ids = params.stop_token_ids
    for token in _CALL_ENDS:
        token_id = card.tokenizer.token_to_id(token)
        if token_id is not None and token_id not in (*card.eos_token_ids, *ids):
            ids = (*ids, token_id)
    return params if len(ids) > MAX_STOP_TOKEN_IDS else replace(params, stop_token_ids=ids)
