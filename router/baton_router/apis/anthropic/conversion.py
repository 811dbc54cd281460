"""Conversion of Messages requests to conversations and options of chat completions, and names of
fields in errors."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from baton.errors import InvalidArgumentError
from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.anthropic.schemas import (
    AnyChoice,
    Block,
    BlocksSource,
    Compaction,
    Conversation,
    CustomTool,
    ImageBlock,
    Message,
    MessagesRequest,
    NoChoice,
    ReadBlock,
    Result,
    SearchResult,
    ServerToolResult,
    ServerToolUse,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolReference,
    ToolUse,
)
from baton_router.apis.anthropic.schemas import ToolChoice as OneTool
from baton_router.apis.edge.body.field_names import FieldNames
from baton_router.apis.openai.conversation import joined_texts, tool_index, with_options
from baton_router.apis.openai.schemas import (
    ChatOptions,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    SchemaFormat,
    Tool,
    ToolChoice,
)
from baton_router.call import generate_call
from baton_router.call.generate_call import GivenImage, ToolCall, Turn

Use = ToolUse | ServerToolUse

_AS_TEXT: Final[Any] = {"ensure_ascii": False}

MESSAGES = FieldNames(
    {
        r"input(\.chat.*)?$": "messages",
        r"parsing\.tools\[(\d+)\]\.parameters_json_schema": lambda body, match: (
            f"{_place(body, match)}.input_schema"
        ),
        r"parsing\.tools\[(\d+)\]": lambda body, match: _place(body, match),
        r"parsing\.tools": "tools",
        r"parsing\.tool_(choice|name)": "tool_choice",
        r"parsing\.max_reasoning_tokens": "thinking.budget_tokens",
        r"sampling\.stop\b": "stop_sequences",
        r"sampling\.grammar.*": "output_config.format",
        r"sampling\.": "",
    }
)


def options_of(body: MessagesRequest) -> ChatOptions:
    """Returns the request without its messages as options of a chat completion."""
    form = body.output_config.format
    return ChatOptions(
        **prompt_options(body),
        stream=body.stream,
        max_completion_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        response_format=None
        if form is None
        else SchemaFormat(json_schema=JsonSchema(name="output", json_schema=form.json_schema)),
        baton=body.baton,
    )


def prompt_options(body: Conversation) -> Json:
    """Returns the options that make the prompt, and those about tools and thinking."""
    fields: Json = {
        "model": body.model,
        "tools": [tool and Tool("function", _function(tool)) for tool in body.tools],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": not body.tool_choice.disable_parallel_tool_use,
        "reasoning_effort": body.output_config.effort,
    }
    if isinstance(body.thinking, ThinkingOff) or _forbids_thinking(body):
        fields["reasoning_effort"] = "none"
    elif isinstance(body.thinking, ThinkingOn):
        fields["thinking_token_budget"] = body.thinking.budget_tokens
        fields["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}
    return fields


def conversation_of(body: Conversation, options: ChatOptions) -> generate_call.Conversation:
    """Returns the conversation. Raises `InvalidArgumentError`, with the path of the field."""
    _check(body.messages)
    system = _text(body.system)
    turns = [Turn("system", (system,))] if system else []
    for at, message in enumerate(body.messages):
        turns += _turns(message, f"messages[{at}]")
    continues = body.messages[-1].role == "assistant" and turns[-1].role == "assistant"
    return with_options(turns, options, merges_turns=True, continues_answer=continues)


def _forbids_thinking(body: Conversation) -> bool:
    """Returns whether a call is forced, and no thinking was asked for: it could leave no tokens for
    the call."""
    is_forced = isinstance(body.tool_choice, AnyChoice | OneTool)
    return is_forced and body.thinking is None and body.output_config.effort is None


def _check(messages: Sequence[Message]) -> None:
    """Raises `InvalidArgumentError` for no message, and for the result of a call that no message
    has."""
    if not messages:
        raise InvalidArgumentError("messages", "is empty; expected one message or more")
    ids = set()
    for at, message in enumerate(messages):
        for block_at, block in enumerate(_blocks(message)):
            if isinstance(block, Use):
                ids.add(block.id)
            elif isinstance(block, Result) and block.tool_use_id not in ids:
                raise InvalidArgumentError(
                    f"messages[{at}].content[{block_at}].tool_use_id",
                    f"is {block.tool_use_id!r}; expected the id of an earlier tool_use block",
                )


def _blocks(message: Message) -> Sequence[object]:
    return message.content if isinstance(message.content, list) else ()


def _turns(message: Message, place: str) -> list[Turn]:
    """Returns the turns of a message: one for each result of a call, and of what is between."""
    if isinstance(message.content, str):
        return [Turn(message.role, (message.content,))]
    if message.role == "system":
        return [Turn("system", (_text(_texts(message.content, place)),))]
    make = _answer if message.role == "assistant" else _asked
    turns: list[Turn] = []
    held: list[tuple[str, Block]] = []  # each with its place
    for at, block in enumerate(message.content):
        field = f"{place}.content[{at}]"
        if isinstance(block, Result):
            if held:
                turns.append(make(held))
                held = []
            turns.append(_result(block, field))
        elif block is not None:
            held.append((field, block))
    if held or not turns:
        turns.append(make(held))
    return turns


def _result(block: Result, field: str) -> Turn:
    if isinstance(block, ServerToolResult):
        content: list[str | GivenImage] = [_told(block.content)]
    else:
        content = _parts(block.content, f"{field}.content")
    return Turn(
        "tool",
        joined_texts(content),
        tool_call_id=block.tool_use_id,
        role_field=f"{field}.type",
    )


def _told(content: Any) -> str:
    """Returns what another server's tool has found, without what only that server can read."""
    return content if isinstance(content, str) else json.dumps(_readable(content), **_AS_TEXT)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_file = value.get("type") == "base64"
    return {
        name: _readable(item)
        for name, item in value.items()
        if not name.startswith("encrypted_") and not (is_file and name == "data")
    }


def _asked(held: Sequence[tuple[str, Block]]) -> Turn:
    """Returns a turn of the user."""
    parts: list[str | GivenImage] = []
    for field, block in held:
        if isinstance(block, ReadBlock):
            parts += _read(block, field)
    return Turn("user", joined_texts(parts))


def _texts(content: Sequence[Block | None], place: str) -> list[TextBlock]:
    """Returns blocks that are all text. Raises `InvalidArgumentError` for another one."""
    texts = []
    for at, block in enumerate(content):
        if block is None:
            continue
        if not isinstance(block, TextBlock):
            raise InvalidArgumentError(
                f"{place}.content[{at}].type",
                f"is {block.__struct_config__.tag!r}; expected 'text' in a message of the system",
            )
        texts.append(block)
    return texts


def _parts(
    content: str | Sequence[ReadBlock | ToolReference], field: str
) -> list[str | GivenImage]:
    """Returns the parts of content at `field`: its images, and the text of all else."""
    if isinstance(content, str):
        return [content]
    return [part for at, block in enumerate(content) for part in _read(block, f"{field}[{at}]")]


def _read(block: ReadBlock | ToolReference, field: str) -> list[str | GivenImage]:
    match block:
        case TextBlock():
            return [block.text]
        case ImageBlock():
            return [GivenImage(block.source.as_url, f"{field}.source")]
        case ToolReference():
            return [block.tool_name]
        case SearchResult():
            texts = (block.title, block.source, _text(block.content))
            return ["\n".join(text for text in texts if text)]
    heads: list[str | GivenImage] = [text for text in (block.title, block.context) if text]
    if isinstance(block.source, BlocksSource):
        return heads + _parts(block.source.content, f"{field}.source.content")
    return [*heads, block.source.data]


def _answer(held: Sequence[tuple[str, Block]]) -> Turn:
    """Returns a turn of the model."""
    blocks = [block for _, block in held]
    texts = [
        block.text if isinstance(block, TextBlock) else block.content or ""
        for block in blocks
        if isinstance(block, TextBlock | Compaction)
    ]
    return Turn(
        "assistant",
        ("\n".join(texts),),
        reasoning="".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock)),
        tool_calls=tuple(
            ToolCall(block.id, block.name, json.dumps(block.input, **_AS_TEXT))
            for block in blocks
            if isinstance(block, Use)
        ),
    )


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _place(body: Conversation, match: re.Match[str]) -> str:
    """Returns the path of a tool in the request, by its index among those of the call."""
    return f"tools[{tool_index(ChatOptions(**prompt_options(body)), match)}]"


def _function(tool: CustomTool) -> Function:
    return Function(tool.name, tool.description, tool.input_schema, tool.strict)


def _tool_choice(body: Conversation) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, OneTool):
        return NamedTool(function=FunctionName(choice.name))
    if isinstance(choice, AnyChoice):
        return "required"
    return "none" if isinstance(choice, NoChoice) else "auto"
