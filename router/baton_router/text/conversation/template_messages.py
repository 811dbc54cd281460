"""Messages and tools in the terms of chat templates."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from baton_router.call.arguments import arguments_object, arguments_text
from baton_router.call.generate_call import Conversation, Turn
from baton_router.call.output_format import Tool
from baton_router.text.template.chat_template import ChatTemplate
from baton_router.text.template.template_probe import TemplateAbilities

TemplateTurn = dict[str, Any]


def template_turns(
    conversation: Conversation, template: ChatTemplate | None = None
) -> list[TemplateTurn]:
    """Returns the messages: content as text, or with images or for a template that needs them as
    parts, null beside calls for one that needs that, and arguments of calls as objects, or as JSON
    for a template that needs text."""
    needs_parts = template is not None and template.needs_parts
    abilities = TemplateAbilities() if template is None else template.abilities
    return [_turn(turn, needs_parts, abilities) for turn in conversation.turns]


def template_tools(conversation: Conversation) -> list[dict[str, Any]]:
    """Returns the tools, as OpenAI's API has them."""
    return [{"type": "function", "function": _described(tool)} for tool in conversation.tools]


def with_frames(turns: Sequence[TemplateTurn], num_frames: Iterable[int]) -> list[TemplateTurn]:
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


def _turn(turn: Turn, needs_parts: bool, abilities: TemplateAbilities) -> TemplateTurn:
    content = _content(turn, needs_parts)
    made: TemplateTurn = {"role": turn.role, "content": content}
    if turn.name:
        made["name"] = turn.name
    if turn.tool_call_id:
        made["tool_call_id"] = turn.tool_call_id
    if turn.reasoning:
        made["reasoning_content"] = turn.reasoning
        # The name of gpt-oss's template, which refuses it beside content: that it takes for
        # reasoning.
        if not content:
            made["thinking"] = turn.reasoning
    if turn.tool_calls:
        if abilities.needs_null_content and not any(turn.parts):
            made["content"] = None
        write = arguments_text if abilities.needs_text_arguments else arguments_object
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": write(call.arguments)},
            }
            for call in turn.tool_calls
        ]
    return made


def _content(turn: Turn, needs_parts: bool) -> str | list[dict[str, str]]:
    texts = [part for part in turn.parts if isinstance(part, str)]
    if not needs_parts and len(texts) == len(turn.parts):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in turn.parts or ("",)
    ]


def _described(tool: Tool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description:
        described["description"] = tool.description
    if tool.parameters:
        described["parameters"] = tool.parameters
    return described
