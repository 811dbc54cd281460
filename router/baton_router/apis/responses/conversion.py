"""Conversion of Responses requests to conversations and options of chat completions, and names of
fields in errors."""

import re
from collections.abc import Sequence
from typing import TypeGuard

from baton.errors import InvalidArgumentError
from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.edge.body.bodies import convert
from baton_router.apis.edge.body.field_names import FieldNames
from baton_router.apis.openai.conversation import joined_texts, tool_index, with_options
from baton_router.apis.openai.schemas import (
    AllowedTools,
    ChatOptions,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ObjectFormat,
    ResponseFormat,
    SchemaFormat,
    SomeTools,
    Tool,
    ToolChoice,
)
from baton_router.apis.responses.functions import Functions
from baton_router.apis.responses.schemas import (
    AllowedFunctions,
    AnyObject,
    FunctionCallItem,
    FunctionCallOutput,
    InputImage,
    InputText,
    Item,
    Message,
    NamedFunction,
    ObjectOfSchema,
    OutputText,
    ReasoningItem,
    Refusal,
    ResponsesRequest,
    TextOptions,
)
from baton_router.call.generate_call import Conversation, GivenImage, ToolCall, Turn

Part = InputText | InputImage | OutputText | Refusal

_RULES = ("system", "developer")

REFERENCE = "item_reference"
"""Type of an item that stands for an item of a stored response."""

RESPONSES = FieldNames(
    {
        r"input\.chat.*": "input",
        r"parsing\.tools\[(\d+)\]\.parameters_json_schema": lambda body, match: (
            f"{_place(body, match)}.parameters"
        ),
        r"parsing\.tools\[(\d+)\]": lambda body, match: _place(body, match),
        r"parsing\.tools": "tools",
        r"parsing\.tool_(choice|name)": "tool_choice",
        r"parsing\.template_variables": "chat_template_kwargs",
        r"sampling\.max_tokens": "max_output_tokens",
        r"sampling\.grammar.*": "text.format",
        r"sampling\.": "",
    }
)


def items_of(body: ResponsesRequest) -> list[Json]:
    """Returns the items of the input, as they were sent; a text is a message of the user."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    return [
        {**item, "type": _short_type(item)}
        if isinstance(item, dict) and item.get("type") is None
        else item
        for item in body.input
    ]


def _short_type(item: Json) -> str:
    """Returns the type of an item that does not say it."""
    return REFERENCE if item.keys() == {"id"} else "message"


def conversation_of(
    options: ChatOptions,
    body: ResponsesRequest,
    functions: Functions,
    earlier: Sequence[Json],
    given: Sequence[Json | None],
) -> Conversation:
    """Returns the conversation of items.

    Args:
        functions: of the request.
        earlier: items of the previous response's conversation, and of its output.
        given: items of the input; None has no place in the conversation.

    Raises:
        InvalidArgumentError: an item is invalid; with the path in the input.
    """
    before: list[Item] = convert(list(earlier), list[Item], "previous_response_id")
    items: list[Item | None] = convert(list(given), list[Item | None], "input")
    _check_outputs(before, items)
    places = ["previous_response_id"] * len(before) + [f"input[{at}]" for at in range(len(items))]
    turns = [Turn("system", (body.instructions,))] if body.instructions else []
    if not (turns or before or items):
        raise InvalidArgumentError("input", "is empty; expected a text or items. Send a message.")
    leads = True
    for item, place in zip([*before, *items], places, strict=True):
        if item is None:
            continue
        leads = leads and isinstance(item, Message) and item.role in _RULES
        turn = _turn(item, place, functions, leads=leads)
        if turn is not None:
            turns.append(turn)
    return with_options(turns, options, are_items=True)


def options_of(body: ResponsesRequest, functions: Functions) -> ChatOptions:
    """Returns the rest of the request as options of a chat completion."""
    return ChatOptions(
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
        cache_salt=body.cache_salt,
        priority=body.priority,
        response_format=_response_format(body.text),
        tools=[
            Tool("function", Function(f.name, f.description, f.tool.parameters, f.tool.strict))
            for f in functions.all
        ],
        tool_choice=_tool_choice(body, functions),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        baton=body.baton,
    )


def _check_outputs(before: Sequence[Item], items: Sequence[Item | None]) -> None:
    """Raises `InvalidArgumentError` for the output of a call that is not in the conversation."""
    call_ids = {item.call_id for item in before if _is_whole_call(item)}
    for at, item in enumerate(items):
        if _is_whole_call(item):
            call_ids.add(item.call_id)
        elif isinstance(item, FunctionCallOutput) and item.call_id not in call_ids:
            raise InvalidArgumentError(
                f"input[{at}].call_id",
                f"is {item.call_id!r}; expected the call_id of an earlier function_call. Send that "
                "item, too, or the previous_response_id of its response.",
            )


def _is_whole_call(item: Item | None) -> TypeGuard[FunctionCallItem]:
    return isinstance(item, FunctionCallItem) and item.status != "incomplete"


def _turn(item: Item, place: str, functions: Functions, *, leads: bool) -> Turn | None:
    """Returns the turn of an item at `place` of the request; None if the model gets nothing of it.
    `leads`: it is one of the instructions that the conversation begins with."""
    match item:
        case FunctionCallItem(status="incomplete"):
            return None  # its arguments end somewhere
        case FunctionCallItem():
            name = functions.name_of(item.namespace, item.name)
            call = ToolCall(item.call_id, name, item.arguments)
            return Turn("assistant", tool_calls=(call,))
        case FunctionCallOutput():
            parts = _parts(item.output, f"{place}.output")
            return Turn("tool", parts, tool_call_id=item.call_id, role_field=place)
        case ReasoningItem():
            thought = "".join(part.text for part in item.content or ())
            return Turn("assistant", reasoning=thought)
    field = f"{place}.content"
    if leads or item.role == "assistant":
        return Turn(item.role, (_text(item.content, field),))
    return Turn(item.role, _parts(item.content, field))


def _parts(content: str | Sequence[Part], field: str) -> tuple[str | GivenImage, ...]:
    """Returns the content of an item, at `field` of the request."""
    if isinstance(content, str):
        return (content,)
    is_earlier = field.startswith("previous_response_id")
    parts: list[str | GivenImage] = []
    for at, part in enumerate(content):
        if isinstance(part, InputImage):
            place = "previous_response_id" if is_earlier else f"{field}[{at}].image_url"
            parts.append(GivenImage(part.image_url, place))
        else:
            parts.append(part.text)
    return joined_texts(parts)


def _text(content: str | Sequence[Part], field: str) -> str:
    """Returns content that has no images. Raises `InvalidArgumentError` if it has one."""
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        if isinstance(part, InputImage):
            raise InvalidArgumentError(
                f"{field}[{at}]", "is an image; expected one in messages of the user alone"
            )
        texts.append(part.text)
    return "\n".join(texts)


def _response_format(text: TextOptions) -> ResponseFormat | None:
    given = text.format
    if isinstance(given, ObjectOfSchema):
        return SchemaFormat(json_schema=JsonSchema(name=given.name, json_schema=given.json_schema))
    return ObjectFormat() if isinstance(given, AnyObject) else None


def _tool_choice(body: ResponsesRequest, functions: Functions) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return _named(choice, functions)
    if isinstance(choice, AllowedFunctions):
        return AllowedTools(
            allowed_tools=SomeTools(choice.mode, [_named(tool, functions) for tool in choice.tools])
        )
    return choice


def _named(function: NamedFunction, functions: Functions) -> NamedTool:
    name = functions.name_of(function.namespace, function.name)
    return NamedTool(function=FunctionName(name))


def _place(body: ResponsesRequest, match: re.Match[str]) -> str:
    """Returns the path of a function in the request, by its index among those of the call."""
    functions = Functions(body.tools)
    return functions.all[tool_index(options_of(body, functions), match)].place
