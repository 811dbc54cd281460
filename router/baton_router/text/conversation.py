"""Conversations as chat templates read them, whichever API they came by.

`normalised` is the one step between a conversation as its client gave it and its rendering: it
makes the turns that templates know, and the variables. Then `template_turns` and `template_tools`
put it in the terms of templates.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any, TypeVar

from baton.errors import InvalidArgumentError
from baton_router.call.generate_call import Conversation, Turn
from baton_router.call.output_format import Tool

TemplateTurn = dict[str, Any]

_Result = TypeVar("_Result")

# Turns above which a thread converts or renders a conversation.
_THREAD_FROM_TURNS = 16
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


async def in_thread_if_long(
    num_turns: int, make: Callable[..., _Result], *arguments: object
) -> _Result:
    """Returns what `make` makes of a conversation, in a thread if it has many turns."""
    if num_turns > _THREAD_FROM_TURNS:
        return await asyncio.to_thread(make, *arguments)
    return make(*arguments)


def normalised(conversation: Conversation) -> Conversation:
    """Returns a conversation as its client gave it with the turns and the variables that chat
    templates expect. Raises `InvalidArgumentError` for a variable that is not for clients to set.
    """
    for name in sorted(_RESERVED & conversation.variables.keys()):
        raise InvalidArgumentError(
            f"parsing.template_variables.{name}", "is not for clients to set"
        )
    variables = {**_of_effort(conversation.effort), **conversation.variables}
    turns = conversation.turns
    if conversation.is_of_items:
        turns = _merged(_with_system_turn(turns))
    return Conversation(turns, conversation.tools, variables)


def _of_effort(effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort == "none":  # the names by which templates turn thinking off
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def _with_system_turn(turns: Sequence[Turn]) -> list[Turn]:
    """Returns the turns with instructions as the system's, of which leading texts are one."""
    rules, rest = list[str](), list[Turn]()
    for turn in turns:
        is_rule = turn.role in ("system", "developer")
        texts = [part for part in turn.parts if isinstance(part, str)]
        if is_rule and not rest and len(texts) == len(turn.parts):
            rules.append("\n".join(texts))
        else:
            rest.append(replace(turn, role="system") if is_rule else turn)
    return [Turn("system", ("\n\n".join(rules),)), *rest] if rules else rest


def _merged(turns: Iterable[Turn]) -> list[Turn]:
    """Returns the turns with adjacent items of the model as one turn."""
    merged: list[Turn] = []
    for is_model, group in groupby(turns, lambda turn: turn.role == "assistant"):
        items = list(group)
        merged += _turns_of_model(items) if is_model else items
    return merged


def _turns_of_model(items: Iterable[Turn]) -> Iterator[Turn]:
    """Yields turns that have reasoning first, one text at most, and no reasoning alone."""
    last: list[Turn] = []
    has_text = is_answer = False
    for item in items:
        is_reasoning = not (item.parts or item.tool_calls)
        if (is_reasoning and is_answer) or (item.parts and has_text):
            yield _joined(last)
            last, has_text, is_answer = [], False, False
        last.append(item)
        has_text = has_text or bool(item.parts)
        is_answer = is_answer or not is_reasoning
    if is_answer:
        yield _joined(last)


def _joined(items: Sequence[Turn]) -> Turn:
    return Turn(
        "assistant",
        tuple(chain.from_iterable(item.parts for item in items)),
        reasoning="".join(item.reasoning for item in items),
        tool_calls=tuple(chain.from_iterable(item.tool_calls for item in items)),
    )


def template_turns(conversation: Conversation, *, needs_parts: bool = False) -> list[TemplateTurn]:
    """Returns the messages: content as text, or with images as parts, arguments of calls as
    objects. `needs_parts`: as `ModelCard.template_needs_parts`."""
    return [_turn(turn, needs_parts) for turn in conversation.turns]


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


def _turn(turn: Turn, needs_parts: bool) -> TemplateTurn:
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
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
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


def _arguments(written: str) -> object:
    """Parses arguments that a model wrote as JSON; returns them unchanged if they are invalid."""
    try:
        return json.loads(written or "{}")
    except (ValueError, RecursionError):
        return written


def _described(tool: Tool) -> dict[str, Any]:
    described: dict[str, Any] = {"name": tool.name}
    if tool.description:
        described["description"] = tool.description
    if tool.parameters is not None:
        described["parameters"] = tool.parameters
    return described
