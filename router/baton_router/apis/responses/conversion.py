"""Conversion of Responses requests to conversations and options of chat completions, and names of
fields in errors."""

import re
from collections.abc import Sequence

import msgspec

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
from baton_router.apis.responses.other_items import (
    CallWithResult,
    LocalShellCall,
    LocalShellOutput,
    OtherCall,
    OtherOutput,
)
from baton_router.apis.responses.parts import InputImage, InputText, OutputText, Refusal
from baton_router.apis.responses.schemas import (
    AllowedFunctions,
    AnyObject,
    FunctionCallItem,
    FunctionCallOutput,
    Item,
    Message,
    NamedFunction,
    ObjectOfSchema,
    ReasoningItem,
    ResponsesRequest,
    TextOptions,
)
from baton_router.call.generate_call import Conversation, GivenImage, ToolCall, Turn

Call = FunctionCallItem | OtherCall
Output = FunctionCallOutput | OtherOutput
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
    given = {name for name, value in item.items() if value is not None}
    return REFERENCE if given == {"id"} else "message"


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
    shell_ids = _shell_ids([*before, *items])
    for item, place in zip([*before, *items], places, strict=True):
        if item is None:
            continue
        if isinstance(item, LocalShellOutput):
            call_id = shell_ids.get(item.call_id, item.call_id)
            item = msgspec.structs.replace(item, call_id=call_id)
        leads = leads and isinstance(item, Message) and item.role in _RULES
        turns += _turns(item, place, functions, leads=leads)
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
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
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
    call_ids = {call_id for item in before for call_id in _call_ids(item)}
    for at, item in enumerate(items):
        call_ids.update(_call_ids(item))
        if isinstance(item, Output) and item.call_id not in call_ids:
            name = "id" if isinstance(item, LocalShellOutput) else "call_id"
            raise InvalidArgumentError(
                f"input[{at}].{name}",
                f"is {item.call_id!r}; expected the call_id of an earlier call. Send that item, "
                "too, or the previous_response_id of its response.",
            )


def _call_ids(item: Item | None) -> Sequence[str]:
    """Returns the ids by which an output may name an item, if that is a whole call."""
    if isinstance(item, LocalShellCall):
        return (item.call_id, item.id)
    return (item.call_id,) if isinstance(item, Call) and not _is_cut(item) else ()


def _shell_ids(items: Sequence[Item | None]) -> dict[str, str]:
    """Returns the ids of calls of a local shell by those of their items, which outputs name."""
    return {item.id: item.call_id for item in items if isinstance(item, LocalShellCall)}


def _is_cut(item: Call | CallWithResult) -> bool:
    """Returns whether the arguments of a call end somewhere."""
    return isinstance(item, FunctionCallItem) and item.status == "incomplete"


def _turns(item: Item, place: str, functions: Functions, *, leads: bool) -> Sequence[Turn]:
    """Returns the turns of an item at `place` of the request; none if the model gets nothing of it.
    `leads`: it is one of the instructions that the conversation begins with."""
    if isinstance(item, Call | CallWithResult):
        if _is_cut(item):
            return ()
        name = functions.name_of(item.namespace, item.name)
        call = Turn("assistant", tool_calls=(ToolCall(item.call_id, name, item.arguments),))
        if not isinstance(item, CallWithResult):
            return (call,)
        result = Turn("tool", (item.result,), tool_call_id=item.call_id, role_field=place)
        return (call, result)
    if isinstance(item, Output):
        parts = _parts(item.output, f"{place}.output")
        return (Turn("tool", parts, tool_call_id=item.call_id, role_field=place),)
    if isinstance(item, ReasoningItem):
        thought = "".join(part.text for part in item.content or ())
        return (Turn("assistant", reasoning=thought),)
    field = f"{place}.content"
    if leads or item.role == "assistant":
        return (Turn(item.role, (_text(item.content, field),)),)
    return (Turn(item.role, _parts(item.content, field)),)


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
