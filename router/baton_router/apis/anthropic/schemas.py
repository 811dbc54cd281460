"""Request schemas of Anthropic's Messages API, as far as it is supported.

Unknown fields are left to `baton_router.apis.edge.body.unknown_fields`. Known ones that would
change the answer and cannot be honoured are refused by name.
"""

from typing import Any, ClassVar, Literal

from msgspec import Struct, field

from baton.errors import InvalidArgumentError
from baton_router.apis.edge.body.left_out import LeftOut
from baton_router.apis.openai.schemas import BatonOptions, ChatRequest, JsonObject

# Fields that would change the answer.
_UNSUPPORTED = ("container", "mcp_servers")


class _Schema(Struct, frozen=True, kw_only=True):
    """Schema whose types are taken literally: no text is a number."""


class _Block(Struct, frozen=True, kw_only=True, tag_field="type"):
    """Block of a message."""


class TextBlock(_Block, frozen=True, tag="text"):
    text: str


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    thinking: str
    # Part of Baton's own answers, which clients send back.
    signature: str = ""


class RedactedThinking(_Block, frozen=True, tag="redacted_thinking"):
    """Thinking of another model, which only its server can read."""

    data: str = ""


class ToolUse(_Block, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: JsonObject = {}


class Base64Source(_Schema, frozen=True, tag_field="type", tag="base64"):
    media_type: str
    data: str

    @property
    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(_Schema, frozen=True, tag_field="type", tag="url"):
    url: str

    @property
    def as_url(self) -> str:
        return self.url


class ImageBlock(_Block, frozen=True, tag="image"):
    source: Base64Source | UrlSource


class PlainTextSource(_Schema, frozen=True, tag_field="type", tag="text"):
    data: str


class BlocksSource(_Schema, frozen=True, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class DocumentBlock(_Block, frozen=True, tag="document"):
    """Document, of text or blocks."""

    source: PlainTextSource | BlocksSource
    title: str = ""
    context: str = ""


class SearchResult(_Block, frozen=True, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]


class ToolReference(_Block, frozen=True, tag="tool_reference"):
    """Name of a tool that a search for tools has found."""

    tool_name: str


ReadBlock = TextBlock | ImageBlock | DocumentBlock | SearchResult
"""Block that the model reads."""


class ToolResult(_Block, frozen=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[ReadBlock | ToolReference] = ""


class Compaction(_Block, frozen=True, tag="compaction"):
    """Summary of the conversation before it."""

    content: str | None = None


class ServerToolUse(_Block, frozen=True, tag="server_tool_use"):
    """Call of a tool that another server ran itself."""

    id: str
    name: str
    input: JsonObject = {}


class McpToolUse(ServerToolUse, frozen=True, tag="mcp_tool_use"):
    """Call of a tool of a server of MCP that another server ran itself."""


class McpToolResult(_Block, frozen=True, tag="mcp_tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] = ""


class ServerToolResult(_Block, frozen=True):
    """Result of a tool that another server ran itself, in the form of that tool."""

    tool_use_id: str
    content: Any = None


class AdvisorResult(ServerToolResult, frozen=True, tag="advisor_tool_result"):
    pass


class BashResult(ServerToolResult, frozen=True, tag="bash_code_execution_tool_result"):
    pass


class CodeResult(ServerToolResult, frozen=True, tag="code_execution_tool_result"):
    pass


class EditorResult(ServerToolResult, frozen=True, tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResult(ServerToolResult, frozen=True, tag="tool_search_tool_result"):
    pass


class WebFetchResult(ServerToolResult, frozen=True, tag="web_fetch_tool_result"):
    pass


class WebSearchResult(ServerToolResult, frozen=True, tag="web_search_tool_result"):
    pass


Result = (
    ToolResult
    | McpToolResult
    | AdvisorResult
    | BashResult
    | CodeResult
    | EditorResult
    | ToolSearchResult
    | WebFetchResult
    | WebSearchResult
)
Block = (
    ReadBlock
    | ThinkingBlock
    | RedactedThinking
    | Compaction
    | ToolUse
    | ServerToolUse
    | McpToolUse
    | Result
)

_LEFT_OUT = frozenset(
    {"container_upload", "fallback", "mcp_tool_listing", "tool_addition", "tool_removal"}
)
"""Types of blocks without text that a model of another server could read."""


class Message(_Schema, frozen=True):
    """Message. Lists of blocks have None in the place of one that was left out."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block | None]


class CustomTool(_Schema, frozen=True, kw_only=True):
    """Tool that the client runs. Lists of tools have None in the place of a tool of another type,
    which is left out (`other_tools`)."""

    type: Literal["custom"] | None = None
    name: str
    input_schema: JsonObject
    description: str | None = None
    strict: bool | None = None


class _Choice(_Schema, frozen=True, kw_only=True, tag_field="type"):
    disable_parallel_tool_use: bool = False


class AutoChoice(_Choice, frozen=True, tag="auto"):
    pass


class AnyChoice(_Choice, frozen=True, tag="any"):
    pass


class ToolChoice(_Choice, frozen=True, tag="tool"):
    name: str


class NoChoice(_Choice, frozen=True, tag="none"):
    pass


class ThinkingOn(_Schema, frozen=True, tag_field="type", tag="enabled"):
    budget_tokens: int
    display: str | None = None


class ThinkingOff(_Schema, frozen=True, tag_field="type", tag="disabled"):
    pass


class ThinkingAdaptive(_Schema, frozen=True, tag_field="type", tag="adaptive"):
    display: str | None = None


class ThinkingBetweenTools(_Schema, frozen=True, tag_field="type", tag="between_tools"):
    display: str | None = None


Thinking = ThinkingOn | ThinkingOff | ThinkingAdaptive | ThinkingBetweenTools


class OutputSchema(_Schema, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonObject = field(name="schema")


class OutputConfig(_Schema, frozen=True):
    effort: str | None = None
    format: OutputSchema | None = None


class Conversation(_Schema, frozen=True, kw_only=True):
    """Conversation and tools: the request body of `/v1/messages/count_tokens`."""

    tool_types: ClassVar[frozenset[str]] = frozenset({"custom"})
    left_out: ClassVar[LeftOut] = LeftOut(("messages", "content"), _LEFT_OUT)

    messages: list[Message]
    model: str = ""
    system: str | list[TextBlock] = ""
    tools: list[CustomTool | None] = []
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice = AutoChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    baton: BatonOptions = field(default_factory=BatonOptions)

    container: Any = None
    mcp_servers: list[Any] = []

    def __post_init__(self) -> None:
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise InvalidArgumentError(name, "is not supported here; leave it out")


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """Request body of `/v1/messages`."""

    # So fields of chat completions that are unknown here are refused.
    becomes: ClassVar[type[Struct]] = ChatRequest

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
