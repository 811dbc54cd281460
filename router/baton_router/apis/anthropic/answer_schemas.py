"""Schemas of answers and errors of the Messages API, for the OpenAPI document. `writer` writes the
answers."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

JsonObject = dict[str, Any]


class AnswerText(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class AnswerThinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnswerToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: JsonObject


class MessageUsage(Struct, frozen=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(Struct, frozen=True, kw_only=True):
    """Response body of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    baton: JsonObject | UnsetType = UNSET


class TokenCount(Struct, frozen=True):
    """Response body of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageErrorDetail(Struct, frozen=True):
    type: str
    message: str


class MessageErrorBody(Struct, frozen=True):
    """Body of an error response."""

    type: Literal["error"]
    error: MessageErrorDetail
