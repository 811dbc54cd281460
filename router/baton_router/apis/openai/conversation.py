"""Conversations and tools of chat completions, as calls of the router have them."""

import re
from collections.abc import Sequence

from baton.errors import InvalidArgumentError
from baton_router.apis.openai.schemas import (
    AllowedTools,
    ChatMessage,
    ChatOptions,
    ChatRequest,
    FunctionCall,
    ImagePart,
    NamedTool,
    RefusalPart,
    TextPart,
    VideoPart,
)
from baton_router.apis.openai.schemas import Tool as OpenAITool
from baton_router.apis.openai.schemas import ToolCall as EarlierCall
from baton_router.call.arguments import text_argument
from baton_router.call.generate_call import Conversation, GivenClip, GivenImage, ToolCall, Turn
from baton_router.call.output_format import Choice, ParsingOptions, Tool
from baton_router.text.model_card import ModelCard

_CHOICES = {"auto": Choice.AUTO, "none": Choice.NONE, "required": Choice.REQUIRED}


def conversation_of(body: ChatRequest) -> Conversation:
    """Returns the conversation. Raises `InvalidArgumentError`."""
    turns = [_turn(message, f"messages[{at}]") for at, message in enumerate(body.messages)]
    return with_options(
        turns,
        body,
        continues_answer=body.continue_final_message,
        begins_answer=body.add_generation_prompt is not False,
    )


def with_options(
    turns: Sequence[Turn],
    options: ChatOptions,
    *,
    are_items: bool = False,
    merges_turns: bool = False,
    continues_answer: bool = False,
    begins_answer: bool = True,
) -> Conversation:
    """Returns the conversation of these turns, with tools and variables; the other arguments are
    its. Raises `InvalidArgumentError`."""
    tools = [_tool(tool) for _, tool in _tools(options)]
    effort = options.reasoning_effort
    return Conversation(
        turns,
        tools,
        options.chat_template_kwargs,
        effort,
        are_items,
        merges_turns,
        continues_answer,
        begins_answer,
    )


def _turn(message: ChatMessage, field: str) -> Turn:
    calls = [
        _call(call, f"{field}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls or ())
    ]
    return Turn(
        message.role,
        tuple(_parts(message, field)),
        message.name or "",
        message.tool_call_id or "",
        message.thought,
        tuple(calls),
        f"{field}.role",
    )


def _call(call: EarlierCall, field: str) -> ToolCall:
    """Returns an earlier call at `field` of the request. Raises `InvalidArgumentError`."""
    made = call.custom if call.type == "custom" else call.function
    if made is None:
        raise InvalidArgumentError(f"{field}.{call.type}", "is missing")
    if isinstance(made, FunctionCall):
        return ToolCall(call.id, made.name, made.arguments)
    return ToolCall(call.id, made.name, text_argument(made.input))


def _parts(message: ChatMessage, field: str) -> Sequence[str | GivenImage]:
    refusal = [message.refusal] if message.refusal else []
    if not isinstance(message.content, list):
        return [message.content, *refusal] if message.content else refusal or [""]
    parts = [
        part.text
        if isinstance(part, TextPart | RefusalPart)
        else _image(part, f"{field}.content[{at}]")
        for at, part in enumerate(message.content)
    ]
    return [*parts, *refusal]


def _image(part: ImagePart | VideoPart, field: str) -> GivenImage:
    if isinstance(part, VideoPart):
        return GivenClip(part.video_url.url, f"{field}.video_url")
    return GivenImage(part.image_url.url, f"{field}.image_url")


def joined_texts(parts: Sequence[str | GivenImage]) -> tuple[str | GivenImage, ...]:
    """Returns the parts of a turn, as one if none is an image."""
    texts = [part for part in parts if isinstance(part, str)]
    return ("\n".join(texts),) if len(texts) == len(parts) else tuple(parts)


def parsing_of(
    options: ChatOptions, card: ModelCard, *, has_free_grammar: bool
) -> ParsingOptions | None:
    """Returns the tools, and how the output is parsed; None: it is text alone.

    Args:
        has_free_grammar: the output must match a grammar that is no JSON schema, from its beginning
            on: so there is no reasoning before it.
    """
    tools, choice = _tools(options), _choice(options)
    has_format = bool(card.reasoning_format) and not has_free_grammar
    is_forced = choice in (Choice.REQUIRED, Choice.NAMED)
    if not (tools or is_forced or has_format or options.thinking_token_budget is not None):
        return None
    named = options.tool_choice.function.name if isinstance(options.tool_choice, NamedTool) else ""
    return ParsingOptions(
        tuple(_tool(tool) for _, tool in tools),
        choice,
        named,
        not options.parallel_tool_calls,
        has_format and options.separate_reasoning,
        options.thinking_token_budget,
    )


def tool_index(options: ChatOptions, match: re.Match[str]) -> int:
    """Returns the index in the request of the tool whose index among those of the call is the first
    group of `match`."""
    index, _ = _tools(options)[int(match[1])]
    return index


def _tools(options: ChatOptions) -> Sequence[tuple[int, OpenAITool]]:
    """Returns the tools that the model may call, each with its index in the request."""
    if options.tool_choice == "none":
        return ()
    tools = [(at, tool) for at, tool in enumerate(options.tools) if tool is not None]
    if not isinstance(options.tool_choice, AllowedTools):
        return tools
    names = [tool.function.name for tool in options.tool_choice.allowed_tools.tools]
    known = {tool.function.name for _, tool in tools}
    for at, name in enumerate(names):
        if name not in known:
            raise InvalidArgumentError(
                f"tool_choice.allowed_tools.tools[{at}].function.name",
                f"is {name!r}; must be the name of one of the tools",
            )
    allowed = set(names)
    return [(at, tool) for at, tool in tools if tool.function.name in allowed]


def _choice(options: ChatOptions) -> Choice:
    choice = options.tool_choice
    if isinstance(choice, NamedTool):
        return Choice.NAMED
    return _CHOICES[choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice]


def _tool(tool: OpenAITool) -> Tool:
    function = tool.function
    strict, description = bool(function.strict), function.description or ""
    return Tool(function.name, function.parameters, strict, description)
