"""Schemas of answers of completions, chat completions and `/v1/models`, for the OpenAPI document.

The answers are written by `choice_formats` and `choice_writer`, which make no object of a schema.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

JsonObject = dict[str, Any]


class _Answer(Struct, frozen=True, kw_only=True):
    """Object of an answer; fields that may be absent are `UNSET` by default."""


class LikelyToken(_Answer, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LikelyToken, frozen=True, kw_only=True):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(_Answer, frozen=True):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(_Answer, frozen=True):
    name: str
    arguments: str


class CallOfTool(_Answer, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Answer, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallOfTool] | UnsetType = UNSET


class _Choice(_Answer, frozen=True, kw_only=True):
    index: int
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(_Answer, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Answer, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionChoice(_Choice, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CachedTokens(_Answer, frozen=True):
    cached_tokens: int


class ReasoningTokens(_Answer, frozen=True):
    reasoning_tokens: int


class CompletionUsage(_Answer, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class _Completion(_Answer, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    usage: CompletionUsage
    baton: JsonObject | UnsetType = UNSET


class Completion(_Completion, frozen=True, kw_only=True):
    """Response body of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_Completion, frozen=True, kw_only=True):
    """Response body of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class ModelEntry(_Answer, frozen=True):
    """Model or alias. `sampling_defaults`: values of sampling parameters that a request leaves
    unset, as far as the model gives them. Fields from `type` on are for Anthropic's clients alone.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    has_chat_template: bool
    takes_images: bool
    has_workers: bool
    pooled_output: Literal["embedding", "score"] | None
    sampling_defaults: dict[str, float]
    alias_of: dict[str, float] | UnsetType = UNSET
    type: Literal["model"] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET
    lifecycle: Literal["active"] | UnsetType = UNSET
    max_input_tokens: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET


class ModelList(_Answer, frozen=True):
    """Response body of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelEntry]
    has_more: bool | UnsetType = UNSET
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET


class Health(_Answer, frozen=True):
    """Response body of `/health`."""

    status: Literal["ok"]
