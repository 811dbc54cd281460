"""Conversations and tools of chat completions, as calls of the router have them."""

from collections.abc import Sequence
from typing import Any

from baton.errors import InvalidArgumentError
from baton_router.apis.openai.schemas import (
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ImagePart,
    LocatedImage,
    NamedTool,
    TextPart,
    VideoPart,
)
from baton_router.apis.openai.schemas import Tool as OpenAITool
from baton_router.call.generate_call import Conversation, GivenClip, GivenImage, ToolCall, Turn
from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.text.conversation import check_variables
from baton_router.text.model_card import ModelCard

_CHOICES = {"auto": Choice.AUTO, "none": Choice.NONE, "required": Choice.REQUIRED}


def conversation_of(body: ChatRequest) -> Conversation:
    """Returns the conversation. Raises `InvalidArgumentError`."""
    turns = [_turn(message, f"messages[{at}]") for at, message in enumerate(body.messages)]
    return Conversation(turns, list(map(_tool, _tools(body))), _variables(body))


def _turn(message: ChatMessage, field: str) -> Turn:
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    ]
    return Turn(
        message.role,
        tuple(_parts(message, field)),
        message.name or "",
        message.tool_call_id or "",
        message.thought,
        tuple(calls),
    )


def _parts(message: ChatMessage, field: str) -> Sequence[str | GivenImage]:
    if not isinstance(message.content, list):
        return [message.content or ""]
    return [
        part.text if isinstance(part, TextPart) else _image(part, f"{field}.content[{at}]")
        for at, part in enumerate(message.content)
    ]


def _image(part: ImagePart | VideoPart, field: str) -> GivenImage:
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


def _variables(body: ChatRequest) -> dict[str, Any]:
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
) -> ParsingOptions | None:
    """Returns the tools, and how the output is parsed; None: it is text alone.

    Args:
        has_free_grammar: the output must match a grammar that is no JSON schema, from its beginning
            on: so there is no reasoning before it.
    """
    tools, choice = _tools(body), _choice(body)
    parses_reasoning = bool(card.reasoning_format) and not has_free_grammar
    is_forced = choice in (Choice.REQUIRED, Choice.NAMED)
    if not (tools or is_forced or parses_reasoning or body.thinking_token_budget is not None):
        return None
    named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else ""
    return ParsingOptions(
        tuple(map(_tool, tools)),
        choice,
        named,
        not body.parallel_tool_calls,
        parses_reasoning,
        body.thinking_token_budget,
    )


def _tools(body: ChatRequest) -> Sequence[OpenAITool]:
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


def _choice(body: ChatRequest) -> Choice:
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return Choice.NAMED
    return _CHOICES[choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice]


def _tool(tool: OpenAITool) -> Tool:
    function = tool.function
    strict, description = bool(function.strict), function.description or ""
    return Tool(function.name, function.parameters, strict, description)
