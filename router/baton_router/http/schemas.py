"""Request schemas of OpenAI's API, as far as it is supported.

Fields that are not listed are rejected by name, so that nothing is ignored silently; the few that
change no answer are accepted and marked. Null equals an absent field. Bounds are not checked here
but with every request's (`baton.sampling`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonObject = dict[str, Any]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Schema):
    """Stream options."""

    include_usage: bool = False
    # Usage so far in each chunk, as other servers report it for load generators.
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class BatonOptions(_Schema):
    """Baton's options, which have no field in OpenAI's API.

    Attributes:
        timeline: the answer includes its timings, its workers and the reasons of its placement.
        timeout_s: deadline in seconds, passed on at every hop.
        priority: workers that schedule by priority serve smaller ones first.
    """

    timeline: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


class JsonSchema(_Schema):
    """JSON schema that the answer always fits, whatever `strict` is."""

    name: str
    json_schema: JsonObject = Field(alias="schema")
    strict: bool = True
    description: str = ""


class TextFormat(_Schema):
    type: Literal["text"]


class ObjectFormat(_Schema):
    type: Literal["json_object"]


class SchemaFormat(_Schema):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class GenerationRequest(_Schema):
    """Request fields that completions and chat completions share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] = []
    response_format: ResponseFormat | None = None

    # Extensions of OpenAI's API, under the names that other servers use.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    baton: BatonOptions = BatonOptions()

    # They change no answer.
    user: str = ""


class CompletionRequest(GenerationRequest):
    """Request body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None


class ContentPart(_Schema):
    """Part of a message. Only text is accepted."""

    type: Literal["text"]
    text: str


class FunctionCall(_Schema):
    name: str
    arguments: str


class ToolCall(_Schema):
    """Tool call that the model made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Schema):
    """Chat message; the chat template decides which roles exist."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Part of OpenAI's own answers, which clients send back.
    annotations: Annotated[list[JsonObject], Field(max_length=0)] = []


class Function(_Schema):
    """Function of a tool, as the chat template shows it to the model."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(_Schema):
    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequest):
    """Request body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Tool] = []
    # Tool calls are part of the answer's text here; they are not parsed.
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: JsonObject = {}
    modalities: list[Literal["text"]] = ["text"]

    # They change no answer.
    metadata: JsonObject = {}
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"
    parallel_tool_calls: Literal[True] = True
    safety_identifier: str = ""
    prompt_cache_key: str = ""
