"""Request schemas of OpenAI's API, as far as it is supported.

A field that is not listed is refused by its name, so that nothing is ignored silently; the few that
change no answer are taken and say so. Null is the same as leaving a field out. Bounds are not
checked here but where every request's are (`baton.sampling`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonObject = dict[str, Any]


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Schema):
    """Options of a stream."""

    include_usage: bool = False
    # The usage so far in each chunk, as other servers have it for load generators.
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class BatonOptions(_Schema):
    """Options that OpenAI's API has no field for.

    Attributes:
        timeline: the answer tells where its time went, where it ran and why.
        timeout_s: the deadline that every hop knows.
        priority: workers that schedule by priority serve smaller ones first.
    """

    timeline: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0


class JsonSchema(_Schema):
    """The schema that an answer fits; it always does, whatever `strict` says."""

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
    """Fields that completions and chat completions share."""

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

    # Not of OpenAI, under the names that other servers have for them.
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
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None


class ContentPart(_Schema):
    """A part of a message. Parts that are no text are refused."""

    type: Literal["text"]
    text: str


class FunctionCall(_Schema):
    name: str
    arguments: str


class ToolCall(_Schema):
    """A call that the model has made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Schema):
    """One turn; which roles there are is for the chat template to say."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # What OpenAI's own answers have, and a client sends back with them.
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
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Tool] = []
    # A model calls tools by what it writes, which is its answer's text here.
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
