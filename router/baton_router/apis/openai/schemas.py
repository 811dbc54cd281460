"""Request schemas of OpenAI's API, as far as it is supported.

Unknown fields of a request and of its messages are left to
`baton_router.apis.edge.body.unknown_fields`; elsewhere they are rejected by name. Null equals an
absent field. Bounds are not checked here but with every request's (`baton.sampling`).
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from baton.errors import InvalidArgumentError
from baton_router.apis.edge.body.bodies import texts_or_ids

JsonObject = dict[str, Any]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]


class _Schema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Schema whose types are taken literally: no text is a number."""


class StreamOptions(_Schema, frozen=True):
    """Stream options."""

    include_usage: bool | None = None
    # Usage so far in each chunk, as other servers report it for load generators, unless
    # `include_usage` is false.
    continuous_usage_stats: bool = False
    # Changes nothing: no padding is added.
    include_obfuscation: bool = False


class BatonOptions(_Schema, frozen=True):
    """Baton's options, which have no field in OpenAI's API.

    Attributes:
        timeline: the answer includes its timings, its workers and the reasons of its placement.
        timeout_s: deadline in seconds, passed on at every hop.
        priority: workers that schedule by priority serve smaller ones first.
    """

    timeline: bool = False
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    priority: Priority = 0


class JsonSchema(_Schema, frozen=True):
    """JSON schema that the answer always fits, whatever `strict` is; without one, any object."""

    name: str
    json_schema: JsonObject = field(name="schema", default_factory=lambda: {"type": "object"})
    strict: bool = True
    description: str = ""


class TextFormat(_Schema, frozen=True, tag_field="type", tag="text"):
    pass


class ObjectFormat(_Schema, frozen=True, tag_field="type", tag="json_object"):
    pass


class SchemaFormat(_Schema, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class StructuralTag(_Schema, frozen=True):
    """JSON between two texts."""

    begin: str
    json_schema: JsonObject = field(name="schema")
    end: str


class JsonContent(_Schema, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonObject


class TriggeredTag(_Schema, frozen=True):
    """JSON between two texts, in the newer form."""

    begin: str
    content: JsonContent
    end: str
    type: Literal["tag"] = "tag"


class TriggeredTags(_Schema, frozen=True, tag_field="type", tag="triggered_tags"):
    """Newer form of `TagsFormat`, of which vLLM has more kinds."""

    triggers: list[str]
    tags: list[TriggeredTag]
    at_least_one: Literal[False] = False
    stop_after_first: Literal[False] = False


class TagsFormat(_Schema, frozen=True, tag_field="type", tag="structural_tag"):
    """Text with JSON between tags in it, in one of the two forms that vLLM takes.

    Attributes:
        triggers: each begins a tag wherever it is in the text.
    """

    structures: list[StructuralTag] = []
    triggers: list[str] = []
    format: TriggeredTags | None = None


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat | TagsFormat


class StructuredOutputs(_Schema, frozen=True, kw_only=True):
    """Constraint of the output, as vLLM takes it. One of the first six fields is given.

    Attributes:
        json: JSON schema, also as text.
        choice: texts of which the output is one.
        grammar: EBNF, in the notation of GBNF or Lark.
        structural_tag: JSON of a `TagsFormat`.
        disable_any_whitespace: False: JSON may have whitespace; unset or True: it is compact.
        whitespace_pattern: regular expression of the whitespace in JSON.
    """

    json: str | JsonObject | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    disable_additional_properties: Literal[False] = False


class GenerationRequest(_Schema, frozen=True, forbid_unknown_fields=False):
    """Request fields that completions and chat completions share.

    Attributes:
        use_beam_search: `n` beams, which are returned; `length_penalty` and `early_stopping` are
            theirs.
        prompt_logprobs: log-probabilities of the prompt's tokens, and of so many most likely ones.
        return_token_ids: the answer has the ids of its tokens and of the prompt's.
        cache_salt: only requests of the tenant with the same salt find their prefixes cached.
        priority: as in `baton`.
    """

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    response_format: ResponseFormat | None = None

    # Extensions of OpenAI's API, under the names that other servers use.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    bad_words: list[str] = []
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    cache_salt: str = ""
    priority: Priority = 0
    baton: BatonOptions = field(default_factory=BatonOptions)

    def __post_init__(self) -> None:
        if self.priority and self.baton.priority not in (0, self.priority):
            raise InvalidArgumentError("priority", "is set beside baton.priority; give one of them")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidArgumentError(
                "prompt_logprobs",
                "is set with stream: true; expected a whole answer",
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InvalidArgumentError("seed", f"is {self.seed}; must be in [-2^63, 2^64)")


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """Request body of `/v1/completions`."""

    prompt: str | list[Any]  # no type can say that all items of a list are of one kind
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "prompt", texts_or_ids(self.prompt, "prompt"))
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            raise InvalidArgumentError(
                "prompt_logprobs", "is set beside echo and logprobs, which are the same; give one"
            )

    @property
    def is_prompt_alone(self) -> bool:
        """True if the prompt is repeated, and nothing follows: its log-probabilities are asked
        for."""
        return self.echo and self.max_tokens == 0


class TextPart(_Schema, frozen=True, forbid_unknown_fields=False, tag_field="type", tag="text"):
    """Text in a message."""

    text: str


class ImageUrl(_Schema, frozen=True, forbid_unknown_fields=False):
    """URL of an image.

    Attributes:
        detail: changes nothing: the model's processor decides about sizes.
    """

    url: str
    detail: str | None = None


class ImagePart(
    _Schema, frozen=True, forbid_unknown_fields=False, tag_field="type", tag="image_url"
):
    """Image in a message."""

    image_url: ImageUrl


class VideoUrl(_Schema, frozen=True, forbid_unknown_fields=False):
    """URL of a clip: an animated GIF, WebP or PNG, or frames."""

    url: str


class VideoPart(
    _Schema, frozen=True, forbid_unknown_fields=False, tag_field="type", tag="video_url"
):
    """Clip in a message, under the name that other servers use."""

    video_url: VideoUrl


class RefusalPart(
    _Schema, frozen=True, forbid_unknown_fields=False, tag_field="type", tag="refusal"
):
    """Refusal of the model in an earlier turn, which is its text."""

    text: str = field(name="refusal")


ContentPart = TextPart | ImagePart | VideoPart | RefusalPart


class FunctionCall(_Schema, frozen=True, forbid_unknown_fields=False):
    name: str
    arguments: str = ""


class CustomCall(_Schema, frozen=True, forbid_unknown_fields=False):
    """Call with a text as argument."""

    name: str
    input: str = ""


class ToolCall(_Schema, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Tool call that a model made in an earlier turn, with the field that its type names."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None


class ChatMessage(_Schema, frozen=True, forbid_unknown_fields=False):
    """Chat message; the chat template decides which roles exist."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # The name under which some other servers take it.
    reasoning: str | None = None
    # Parts of OpenAI's own answers, which clients send back.
    refusal: str | None = None
    annotations: list[JsonObject] = []

    @property
    def thought(self) -> str:
        """Reasoning of the model before `content`."""
        return self.reasoning_content or self.reasoning or ""


class Function(_Schema, frozen=True):
    """Function of a tool.

    Attributes:
        strict: the arguments of each call are valid under `parameters`.
    """

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(_Schema, frozen=True):
    """Tool that the client runs. Lists of tools have None in the place of a tool of another type,
    which is left out (`other_tools`)."""

    type: Literal["function"]
    function: Function


class FunctionName(_Schema, frozen=True):
    name: str


class NamedTool(_Schema, frozen=True, tag_field="type", tag="function"):
    """Name of a tool, as a choice: the model must call it."""

    function: FunctionName


class SomeTools(_Schema, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(_Schema, frozen=True, tag_field="type", tag="allowed_tools"):
    """Choice among some of the tools; the others are not described to the model."""

    allowed_tools: SomeTools


ToolChoice = Literal["auto", "none", "required"] | NamedTool | AllowedTools


class ChatOptions(GenerationRequest, frozen=True, kw_only=True):
    """Request fields of chat completions beside the conversation.

    Attributes:
        reasoning_effort: variable of the chat template; "none" also turns thinking off.
        thinking_token_budget: maximum tokens of reasoning, after which it is ended.
        include_reasoning: False: the answer comes without its reasoning.
        separate_reasoning: False: reasoning is part of the text, with its marks.
    """

    tool_types: ClassVar[frozenset[str]] = frozenset({"function"})

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Tool | None] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject = {}
    modalities: list[Literal["text"]] = []

    # Extensions, under the names that other servers use.
    thinking_token_budget: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("logprobs", "return_token_ids"):
            if getattr(self, name) and not self.include_reasoning:
                raise InvalidArgumentError(
                    name,
                    "is set beside include_reasoning: false; expected one of them, since it would "
                    "tell the tokens of the reasoning",
                )


class ChatRequest(ChatOptions, frozen=True, kw_only=True):
    """Request body of `/v1/chat/completions`."""

    messages: list[ChatMessage]

    # Extensions, under the names that other servers use.
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_prompt_end(self)


class TokenizeRequest(_Schema, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Request body of `/tokenize`: a prompt or a conversation.

    Attributes:
        add_special_tokens: of a prompt; the chat template adds those of a conversation.
    """

    tool_types: ClassVar[frozenset[str]] = ChatOptions.tool_types

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[Tool | None] = []
    chat_template_kwargs: JsonObject = {}
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        _check_prompt_end(self)


class TokenizeResponse(Struct, frozen=True):
    """Response body of `/tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(_Schema, frozen=True, forbid_unknown_fields=False):
    """Request body of `/detokenize`."""

    tokens: list[int]
    model: str = ""


class DetokenizeResponse(Struct, frozen=True):
    """Response body of `/detokenize`."""

    prompt: str


class EmbeddingRequest(_Schema, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Request body of `/v1/embeddings`.

    Attributes:
        input: a text, token ids, or a list of either.
        dimensions: the first that many values, normalized again.
    """

    model: str = ""
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    baton: BatonOptions = field(default_factory=BatonOptions)

    def __post_init__(self) -> None:
        force_setattr(self, "input", texts_or_ids(self.input, "input"))


class TokenUsage(Struct, frozen=True):
    """Tokens of a request for pooled outputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Struct, frozen=True, kw_only=True):
    """Embedding of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(Struct, frozen=True, kw_only=True):
    """Response body of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TokenUsage


class ScoreRequest(_Schema, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Request body of `/v1/score`: pairs of texts, under either names.

    Attributes:
        text_1, queries: one text for all of the others, or as many.
        text_2, documents: the others.
    """

    model: str = ""
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    baton: BatonOptions = field(default_factory=BatonOptions)


class Score(Struct, frozen=True, kw_only=True):
    """Score of one pair."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreResponse(Struct, frozen=True, kw_only=True):
    """Response body of `/v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TokenUsage


class RerankText(_Schema, frozen=True, forbid_unknown_fields=False):
    """Document of a rerank request, as an object."""

    text: str


class RerankRequest(_Schema, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Request body of `/rerank`, `/v1/rerank` and `/v2/rerank`, as Jina and Cohere have it.

    Attributes:
        top_n: number of documents to return; None: all.
        return_documents: the answer has their texts; unset: not that of `/v2/rerank`.
    """

    model: str = ""
    query: str
    documents: list[str | RerankText]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    baton: BatonOptions = field(default_factory=BatonOptions)


class RerankDocument(Struct, frozen=True):
    """Text of a document."""

    text: str


class RerankResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Document with its score. `index`: in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankResponse(Struct, frozen=True, kw_only=True):
    """Response body of rerank requests: the best document first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: TokenUsage


class VersionResponse(Struct, frozen=True):
    """Response body of `/version`."""

    version: str


def _check_prompt_end(body: ChatRequest | TokenizeRequest) -> None:
    """Raises `InvalidArgumentError` for an answer that both continues the last message and begins a
    new one."""
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidArgumentError(
            "add_generation_prompt", "is True; expected False with continue_final_message = True"
        )
