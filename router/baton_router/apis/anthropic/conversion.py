"""Conversion of Messages requests to chat completions, and names of fields in errors back."""

import json
import re
from collections.abc import Sequence

from baton.errors import InvalidArgumentError
from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.anthropic.schemas import (
    AnyChoice,
    Conversation,
    CustomTool,
    ImageBlock,
    Message,
    MessagesRequest,
    NoChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingOff,
    ThinkingOn,
    ToolResult,
    ToolUse,
)
from baton_router.apis.anthropic.schemas import ToolChoice as OneTool
from baton_router.apis.openai.conversation import text_or_parts
from baton_router.apis.openai.sampling import in_openai_terms, renamed
from baton_router.apis.openai.schemas import (
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
    SchemaFormat,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)

# Fields of chat completions that have another name in the Messages API.
_NAMES = (
    (re.compile(r"messages.*"), "messages"),
    (re.compile(r"max_completion_tokens"), "max_tokens"),
    (re.compile(r"stop\b(?!_)"), "stop_sequences"),
    (re.compile(r"response_format"), "output_config.format"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"thinking_token_budget"), "thinking.budget_tokens"),
    (re.compile(r"(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function\b"), r"\1"),
)


def chat_request(body: MessagesRequest) -> ChatRequest:
    """Returns the same request as a chat completion. Raises `InvalidArgumentError`, with the path
    of the field."""
    form = body.output_config.format
    return ChatRequest(
        **_conversation(body),
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


def counted_request(body: Conversation) -> ChatRequest:
    """Returns a chat completion with the same prompt, as `chat_request` does."""
    return ChatRequest(**_conversation(body))


def in_messages_terms(error: InvalidArgumentError, chat: ChatRequest) -> InvalidArgumentError:
    """Returns an error of the chat completion with the field names of the Messages API."""
    return renamed(in_openai_terms(error, chat), _NAMES)


def _conversation(body: Conversation) -> Json:
    """Returns the fields of a chat completion that make its prompt."""
    _check(body.messages)
    system = _text(body.system)
    messages = [ChatMessage("system", system)] if system else []
    for at, message in enumerate(body.messages):
        messages += _converted(message, f"messages[{at}]")
    fields: Json = {
        "model": body.model,
        "messages": messages,
        "tools": [Tool("function", _function(tool)) for tool in body.tools],
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


def _forbids_thinking(body: Conversation) -> bool:
    """Returns whether a call is forced, and no thinking was asked for: it could leave no tokens for
    the call."""
    is_forced = isinstance(body.tool_choice, AnyChoice | OneTool)
    return is_forced and body.thinking is None and body.output_config.effort is None


def _check(messages: Sequence[Message]) -> None:
    """Raises `InvalidArgumentError` for the result of a call that no message has, and for the
    beginning of an answer."""
    if not messages:
        raise InvalidArgumentError("messages", "is empty; expected one message or more")
    ids = set()
    for at, message in enumerate(messages):
        for block_at, block in enumerate(_blocks(message)):
            if isinstance(block, ToolUse):
                ids.add(block.id)
            elif isinstance(block, ToolResult) and block.tool_use_id not in ids:
                raise InvalidArgumentError(
                    f"messages[{at}].content[{block_at}].tool_use_id",
                    f"is {block.tool_use_id!r}; expected the id of an earlier tool_use block",
                )
    if messages[-1].role == "assistant":
        raise InvalidArgumentError(
            f"messages[{len(messages) - 1}].role",
            "is 'assistant'; expected 'user'. The beginning of an answer cannot be given here.",
        )


def _blocks(message: Message) -> Sequence[object]:
    return message.content if isinstance(message.content, list) else ()


def _converted(message: Message, place: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    if message.role == "assistant":
        return [_turn(message)]
    messages: list[ChatMessage] = []
    parts: list[ContentPart] = []
    for at, block in enumerate(message.content):
        field = f"{place}.content[{at}]"
        if isinstance(block, ToolResult):
            if parts:
                messages.append(ChatMessage("user", text_or_parts(parts)))
                parts = []
            output: str | list[ContentPart]
            if isinstance(block.content, str):
                output = block.content
            else:
                inner = enumerate(block.content)
                output = text_or_parts([_part(each, f"{field}.content[{i}]") for i, each in inner])
            messages.append(ChatMessage("tool", output, tool_call_id=block.tool_use_id))
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(_part(block, field))
    if parts or not messages:
        messages.append(ChatMessage("user", text_or_parts(parts)))
    return messages


def _part(block: TextBlock | ImageBlock, field: str) -> ContentPart:
    if isinstance(block, TextBlock):
        return TextPart(text=block.text)
    image = LocatedImage(url=block.source.as_url, field=f"{field}.source")
    return ImagePart(image_url=image)


def _turn(message: Message) -> ChatMessage:
    """Returns an answer of the model."""
    blocks = _blocks(message)
    calls = [
        ToolCall(id=block.id, function=FunctionCall(block.name, _arguments(block)))
        for block in blocks
        if isinstance(block, ToolUse)
    ]
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return ChatMessage(
        "assistant",
        _text([block for block in blocks if isinstance(block, TextBlock)]),
        tool_calls=calls or None,
        reasoning_content=thought or None,
    )


def _arguments(block: ToolUse) -> str:
    return json.dumps(block.input, ensure_ascii=False)


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: CustomTool) -> Function:
    return Function(tool.name, tool.description, tool.input_schema, tool.strict)


def _tool_choice(body: Conversation) -> ToolChoice:
    choice = body.tool_choice
    if isinstance(choice, OneTool):
        return NamedTool(function=FunctionName(choice.name))
    if isinstance(choice, AnyChoice):
        return "required"
    return "none" if isinstance(choice, NoChoice) else "auto"
