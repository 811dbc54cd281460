"""Schemas of answers of `/v1/responses`, for the OpenAPI document. `writer` writes the answers."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

JsonObject = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[JsonObject]
    logprobs: list[JsonObject]


class ReasoningTextPart(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputTextPart]


class OutputReasoning(Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    summary: list[JsonObject]
    content: list[ReasoningTextPart]


class OutputCall(Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(Struct, frozen=True):
    reason: str


class GivenReasoning(Struct, frozen=True):
    effort: str | None
    summary: str | None


class GivenText(Struct, frozen=True):
    format: JsonObject
    verbosity: str | None = None


class InputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseBody(Struct, frozen=True, kw_only=True):
    """Response body of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool
    error: ResponseError | None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: GivenReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: GivenText
    tool_choice: str | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    baton: JsonObject | UnsetType = UNSET


class InputTokens(Struct, frozen=True):
    """Response body of a count of tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Struct, frozen=True):
    """Response body of a deletion."""

    id: str
    object: Literal["response"]
    deleted: bool
