"""Request schemas of OpenAI's Responses API, as far as it is supported.

Unknown fields of a request, of `text` and of `reasoning` are left to
`baton_router.apis.edge.body.unknown_fields`; elsewhere they are refused by name, and so are known
ones that would change the answer and cannot be honoured.
"""

from typing import Any, ClassVar, Literal

from msgspec import Struct, field

from baton.errors import InvalidArgumentError
from baton_router.apis.edge.body.left_out import LeftOut
from baton_router.apis.edge.body.objects import Hint
from baton_router.apis.openai.schemas import (
    BatonOptions,
    ChatRequest,
    JsonObject,
    Priority,
    StreamOptions,
)
from baton_router.apis.responses.other_items import LEFT_OUT, OtherItem
from baton_router.apis.responses.parts import (
    InputImage,
    InputText,
    ItemSchema,
    OutputText,
    ReasoningText,
    Refusal,
)

# Bounds of `metadata`, as of OpenAI's API.
_MAX_METADATA = 16
_MAX_METADATA_KEY, _MAX_METADATA_VALUE = 64, 512

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities; others have no effect."""

# Fields that would change the answer.
_UNSUPPORTED = ("background", "context_management", "conversation", "moderation", "prompt")


class _Schema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Schema whose types are taken literally: no text is a number."""


class Message(ItemSchema, frozen=True, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | InputImage | OutputText | Refusal]


class FunctionCallItem(ItemSchema, frozen=True, tag="function_call"):
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallOutput(ItemSchema, frozen=True, tag="function_call_output"):
    call_id: str
    output: str | list[InputText | InputImage] = ""


class ReasoningItem(ItemSchema, frozen=True, tag="reasoning"):
    """Reasoning of an earlier answer. Only its text counts, not a summary of it."""

    content: list[ReasoningText] | None = None


Item = Message | FunctionCallItem | FunctionCallOutput | ReasoningItem | OtherItem


class FunctionTool(_Schema, frozen=True, tag_field="type", tag="function"):
    """Function that the model may call. Lists of tools have None in the place of a tool of another
    type, which is left out (`other_tools`)."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Namespace(_Schema, frozen=True, tag_field="type", tag="namespace"):
    """Functions that share a namespace, in which their calls come back."""

    name: str
    description: str | None = None
    tools: list[FunctionTool | None] = []


class NamedFunction(_Schema, frozen=True, tag_field="type", tag="function", omit_defaults=True):
    """Function that is chosen. It is given back, and clients take no null in it."""

    name: str
    namespace: str | None = None


class AllowedFunctions(_Schema, frozen=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class PlainText(_Schema, frozen=True, tag_field="type", tag="text"):
    pass


class AnyObject(_Schema, frozen=True, tag_field="type", tag="json_object"):
    pass


class ObjectOfSchema(_Schema, frozen=True, tag_field="type", tag="json_schema"):
    name: str
    json_schema: JsonObject = field(name="schema")
    strict: bool = False
    description: str | None = None


class TextOptions(_Schema, frozen=True, forbid_unknown_fields=False):
    """Format of the text."""

    format: PlainText | AnyObject | ObjectOfSchema = PlainText()
    verbosity: Hint[str | None] = None


class ReasoningOptions(_Schema, frozen=True, forbid_unknown_fields=False):
    """Effort of reasoning. Reasoning is not summarized: it is part of the answer."""

    effort: str | None = None
    summary: Hint[str | None] = None


class ResponsesRequest(_Schema, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Request body of `/v1/responses`. `metadata`, `user` and hints are in the answer."""

    # So fields of chat completions that are unknown here are refused.
    becomes: ClassVar[type[Struct]] = ChatRequest
    tool_types: ClassVar[frozenset[str]] = frozenset({"function", "namespace"})
    left_out: ClassVar[LeftOut] = LeftOut(("input",), LEFT_OUT)

    input: str | list[Any] = []
    model: str = ""
    instructions: str = ""
    previous_response_id: str | None = None
    stream: bool = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool | Namespace | None] = []
    tool_choice: Literal["auto", "none", "required"] | NamedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    store: bool = True
    metadata: dict[str, str] = {}
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    user: str = ""
    max_tool_calls: Hint[int | None] = None
    prompt_cache_key: Hint[str | None] = None
    safety_identifier: Hint[str | None] = None
    service_tier: Hint[str | None] = None

    # Extensions, as of chat completions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | list[str] = []
    ignore_eos: bool = False
    cache_salt: str = ""
    priority: Priority = 0
    chat_template_kwargs: JsonObject = {}
    baton: BatonOptions = field(default_factory=BatonOptions)

    background: bool = False
    context_management: Any = None
    conversation: Any = None
    moderation: Any = None
    prompt: Any = None
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: int = 0
    include: list[str] = []

    def __post_init__(self) -> None:
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise InvalidArgumentError(name, "is not supported here; leave it out")
        _check_metadata(self.metadata)

    @property
    def has_logprobs(self) -> bool:
        """True if the log-probabilities of the text are asked for."""
        return self.top_logprobs > 0 or LOGPROBS in self.include


def _check_metadata(metadata: dict[str, str]) -> None:
    """Raises `InvalidArgumentError` beyond the bounds of metadata, which the answer repeats."""
    if len(metadata) > _MAX_METADATA:
        problem = f"has {len(metadata)} keys; expected at most {_MAX_METADATA}"
        raise InvalidArgumentError("metadata", problem)
    for key, value in metadata.items():
        for what, text, most in (
            ("a key", key, _MAX_METADATA_KEY),
            ("a value", value, _MAX_METADATA_VALUE),
        ):
            if len(text) > most:
                raise InvalidArgumentError(
                    f"metadata.{key[:_MAX_METADATA_KEY]}",
                    f"has {what} of {len(text)} characters; expected at most {most}",
                )
