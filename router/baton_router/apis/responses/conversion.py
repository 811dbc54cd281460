"""Conversion of Responses requests to chat completions, and names of fields in errors back."""

import re
from collections.abc import Sequence
from typing import TypeGuard

from baton.errors import InvalidArgumentError
from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.edge.bodies import convert
from baton_router.apis.openai.conversation import text_or_parts
from baton_router.apis.openai.sampling import in_openai_terms, renamed
from baton_router.apis.openai.schemas import (
    AllowedTools,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Function,
    FunctionCall,
    FunctionName,
    ImagePart,
    JsonSchema,
    LocatedImage,
    NamedTool,
    ObjectFormat,
    ResponseFormat,
    SchemaFormat,
    SomeTools,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
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

Part = InputText | InputImage | OutputText | Refusal

# Fields of chat completions that have another name in the Responses API.
_NAMES = (
    (re.compile(r"messages.*"), "input"),
    (re.compile(r"max_tokens|max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)


def items_of(body: ResponsesRequest) -> list[Json]:
    """Returns the items of the input, as they were sent; a text is a message of the user."""
    if isinstance(body.input, str):
        return [{"type": "message", "role": "user", "content": body.input}]
    if not body.input:
        raise InvalidArgumentError("input", "is empty; expected a text or items. Send a message.")
    return [
        {"type": "message", **item} if isinstance(item, dict) and "type" not in item else item
        for item in body.input
    ]


def chat_request(
    body: ResponsesRequest, earlier: Sequence[Json], given: Sequence[Json]
) -> ChatRequest:
    """Returns the same request as a chat completion.

    Args:
        earlier: items of the previous response's conversation, and of its output.
        given: items of the input.

    Raises:
        InvalidArgumentError: an item is invalid; with the path in the input.
    """
    before: list[Item] = convert(list(earlier), list[Item], "previous_response_id")
    items: list[Item] = convert(list(given), list[Item], "input")
    _check_outputs(before, items)
    return ChatRequest(
        model=body.model,
        messages=_messages(
            body.instructions,
            [
                *((item, "previous_response_id") for item in before),
                *((item, f"input[{at}]") for at, item in enumerate(items)),
            ],
        ),
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
        response_format=_response_format(body.text),
        tools=[
            Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in body.tools
        ],
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        baton=body.baton,
    )


def in_responses_terms(error: InvalidArgumentError, chat: ChatRequest) -> InvalidArgumentError:
    """Returns an error of the chat completion with the field names of the Responses API."""
    return renamed(in_openai_terms(error, chat), _NAMES)


def _check_outputs(before: Sequence[Item], items: Sequence[Item]) -> None:
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


def _is_whole_call(item: Item) -> TypeGuard[FunctionCallItem]:
    return isinstance(item, FunctionCallItem) and item.status != "incomplete"


def _messages(instructions: str, items: Sequence[tuple[Item, str]]) -> list[ChatMessage]:
    """Returns the messages of a conversation, for chat templates that take one system message at
    its beginning, and the calls and the text of a turn in one message.

    Args:
        items: with the path of each in the request.
    """
    rules = [instructions] if instructions else []
    num_leading = 0
    for item, place in items:
        if not (isinstance(item, Message) and item.role in ("system", "developer")):
            break
        rules.append(_text(item.content, f"{place}.content"))
        num_leading += 1
    messages = _Messages()
    if rules:
        messages.add(ChatMessage("system", "\n\n".join(rules)))
    for item, place in items[num_leading:]:
        _add(messages, item, place)
    return messages.end()


def _add(messages: "_Messages", item: Item, place: str) -> None:
    match item:
        case Message(role="assistant"):
            messages.say(_text(item.content, f"{place}.content"))
        case Message():
            role = "system" if item.role == "developer" else item.role
            messages.add(ChatMessage(role, _content(item.content, f"{place}.content")))
        case FunctionCallItem(status="incomplete"):
            pass  # its arguments end somewhere
        case FunctionCallItem():
            call = FunctionCall(item.name, item.arguments)
            messages.call(ToolCall(id=item.call_id, function=call))
        case FunctionCallOutput():
            output = _content(item.output, f"{place}.output")
            messages.add(ChatMessage("tool", output, tool_call_id=item.call_id))
        case ReasoningItem():
            messages.think("".join(part.text for part in item.content or ()))


class _Messages:
    """Messages of a conversation. Adjacent items of the model are one message."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, message: ChatMessage) -> None:
        self._end_turn()
        self._messages.append(message)

    def think(self, text: str) -> None:
        if self._text is not None or self._calls:
            self._end_turn()
        self._thoughts.append(text)

    def say(self, text: str) -> None:
        if self._text is not None:
            self._end_turn()
        self._text = text

    def call(self, call: ToolCall) -> None:
        self._calls.append(call)

    def end(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    def _end_turn(self) -> None:
        if self._text is not None or self._calls:
            message = ChatMessage(
                "assistant",
                self._text,
                tool_calls=self._calls or None,
                reasoning_content="".join(self._thoughts) or None,
            )
            self._messages.append(message)
        self._thoughts, self._text, self._calls = [], None, []


def _content(content: str | Sequence[Part], field: str) -> str | list[ContentPart]:
    """Returns the content of a message, at `field` of the request."""
    if isinstance(content, str):
        return content
    is_earlier = field.startswith("previous_response_id")
    parts: list[ContentPart] = []
    for at, part in enumerate(content):
        if isinstance(part, InputImage):
            place = "previous_response_id" if is_earlier else f"{field}[{at}].image_url"
            parts.append(ImagePart(image_url=LocatedImage(url=part.image_url, field=place)))
        else:
            parts.append(TextPart(text=part.text))
    return text_or_parts(parts)


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


def _tool_choice(body: ResponsesRequest) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        return AllowedTools(
            allowed_tools=SomeTools(choice.mode, [_named(tool) for tool in choice.tools])
        )
    return choice


def _named(function: NamedFunction) -> NamedTool:
    return NamedTool(function=FunctionName(function.name))
