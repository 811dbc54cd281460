"""Tools and reasoning of chat completions, as templates and the router's requests have them."""

import json
from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton.v1 import inference_pb2 as pb
from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.openai.schemas import (
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImagePart,
    LocatedImage,
    NamedTool,
    TextPart,
    Tool,
    VideoPart,
)
from baton_router.text.images.image_source import GivenClip, GivenImage
from baton_router.text.model_card import ModelCard
from baton_router.text.parsing import (
    add_reasoning,
    call_arguments,
    check_variables,
    template_content,
)

_CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


def template_turns(body: ChatRequest, *, needs_parts: bool = False) -> list[Json]:
    """Returns the messages as chat templates read them: content as text, or with images as parts,
    arguments of calls as objects. `needs_parts`: as `ModelCard.template_needs_parts`."""
    return [_turn(message, needs_parts) for message in body.messages]


def images_of(body: ChatRequest) -> list[GivenImage]:
    """Returns the images and clips of a conversation, in order."""
    return [
        _given(part, f"messages[{at}].content[{part_at}]")
        for at, message in enumerate(body.messages)
        for part_at, part in enumerate(_parts(message))
        if not isinstance(part, TextPart)
    ]


def _given(part: ImagePart | VideoPart, field: str) -> GivenImage:
    if isinstance(part, VideoPart):
        return GivenClip(part.video_url.url, f"{field}.video_url")
    image = part.image_url
    if isinstance(image, LocatedImage):
        return GivenImage(image.url, image.field)
    return GivenImage(image.url, f"{field}.image_url")


def text_or_parts(parts: Sequence[ContentPart]) -> str | list[ContentPart]:
    """Returns content as text if it has no images."""
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(parts) else list(parts)


def _parts(message: ChatMessage) -> Sequence[ContentPart]:
    return message.content if isinstance(message.content, list) else ()


def _turn(message: ChatMessage, needs_parts: bool) -> Json:
    content: Sequence[str | None] = [message.content if isinstance(message.content, str) else ""]
    if isinstance(message.content, list):
        content = [part.text if isinstance(part, TextPart) else None for part in message.content]
    turn: Json = {"role": message.role, "content": template_content(content, needs_parts)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    add_reasoning(turn, message.thought)
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": call_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def template_tools(body: ChatRequest) -> list[Json]:
    """Returns the tools that the chat template describes."""
    return [{"type": "function", "function": _described(tool)} for tool in _tools(body)]


def _described(tool: Tool) -> Json:
    function = tool.function
    shown = {"description": function.description, "parameters": function.parameters}
    return {"name": function.name, **{k: v for k, v in shown.items() if v is not None}}


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """Returns the variables of the chat template. Raises `InvalidArgumentError`."""
    check_variables(body.chat_template_kwargs, "chat_template_kwargs")
    effort = body.reasoning_effort
    if effort is None:
        return body.chat_template_kwargs
    if effort == "none":  # the names by which templates turn thinking off
        return {"enable_thinking": False, "thinking": False, **body.chat_template_kwargs}
    return {"reasoning_effort": effort, **body.chat_template_kwargs}


def parsing_of(
    body: ChatRequest, card: ModelCard, *, has_free_grammar: bool
) -> pb.OutputParsing | None:
    """Returns the tools, and how the output is parsed; None: it is text alone.

    Args:
        has_free_grammar: the output must match a grammar that is no JSON schema, from its beginning
            on: so there is no reasoning before it.
    """
    tools = _tools(body)
    parses_reasoning = bool(card.reasoning_format) and not has_free_grammar
    is_needed = tools or _is_forced(body) or body.thinking_token_budget is not None
    if not (is_needed or parses_reasoning):
        return None
    parsing = pb.OutputParsing(
        tools=map(_tool, tools),
        tool_choice=_choice(body),
        one_tool_call=not body.parallel_tool_calls,
        reasoning=parses_reasoning,
        max_reasoning_tokens=body.thinking_token_budget,
    )
    if isinstance(body.tool_choice, NamedTool):
        parsing.tool_name = body.tool_choice.function.name
    return parsing


def _tools(body: ChatRequest) -> Sequence[Tool]:
    """Returns the tools that the model may call."""
    if body.tool_choice == "none":
        return ()
    if not isinstance(body.tool_choice, AllowedTools):
        return body.tools
    names = [tool.function.name for tool in body.tool_choice.allowed_tools.tools]
    known = {tool.function.name for tool in body.tools}
    for at, name in enumerate(names):
        if name not in known:
            raise InvalidArgumentError(
                f"tool_choice.allowed_tools.tools[{at}].function.name",
                f"is {name!r}; must be the name of one of the tools",
            )
    return [tool for tool in body.tools if tool.function.name in names]


def _is_forced(body: ChatRequest) -> bool:
    return _choice(body) in (pb.TOOL_CHOICE_REQUIRED, pb.TOOL_CHOICE_NAMED)


def _choice(body: ChatRequest) -> pb.ToolChoice.ValueType:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return pb.TOOL_CHOICE_NAMED
    return _CHOICES[choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice]


def _tool(tool: Tool) -> pb.Tool:
    function = tool.function
    schema = "" if function.parameters is None else json.dumps(function.parameters)
    return pb.Tool(
        name=function.name,
        description=function.description or "",
        parameters_json_schema=schema,
        strict=bool(function.strict),
    )
