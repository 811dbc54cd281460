"""Call for a generation, as any API reads it from what its client sent. Paths of fields in errors
are those of `baton.v1.GenerateRequest`; each API maps them to its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams
from baton_router.call.ending import FinishReason
from baton_router.call.output_format import ParsingOptions, Tool


@dataclass(frozen=True, slots=True)
class GivenImage:
    """Image as a client gave it.

    Attributes:
        source: encoded file, or a URL.
        field: path of the field that has it, in the client's own terms.
    """

    source: bytes | str
    field: str


@dataclass(frozen=True, slots=True)
class GivenClip(GivenImage):
    """Clip as a client gave it, whose frames become images. A data URL may have one file for each
    frame, with commas between."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool in an earlier turn. `arguments`: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Message of a conversation.

    Attributes:
        parts: texts, images and clips, in order.
        name: of the tool whose result it is, or of its author.
        tool_call_id: of the call whose result it is.
        reasoning: the model's, before what it said.
        role_field: path of the field that gives it its role, in the client's own terms.
    """

    role: str
    parts: tuple[str | GivenImage, ...] = ()
    name: str = ""
    tool_call_id: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    role_field: str = field(default="", compare=False)

    @property
    def texts(self) -> Iterator[str]:
        """All texts in it."""
        yield from (self.role, self.reasoning, self.name, self.tool_call_id)
        yield from (part for part in self.parts if isinstance(part, str))
        for call in self.tool_calls:
            yield from (call.id, call.name, call.arguments)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation as a client gave it, which is normalised before a chat template renders it.

    Attributes:
        tools: described to the model.
        variables: of the template, which the client sets.
        effort: of reasoning; "none" turns it off, None leaves it to the template.
        is_of_items: each turn is one item: what the model thought, said and called in one turn is
            in several, and instructions may lead in several.
        merges_turns: adjacent turns of the user, and of the model, are one.
        continues_answer: the last turn is the beginning of the answer.
        begins_answer: the prompt ends with what the template puts before an answer, unless it
            continues one.
    """

    turns: Sequence[Turn]
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    effort: str | None = None
    is_of_items: bool = False
    merges_turns: bool = False
    continues_answer: bool = False
    begins_answer: bool = True

    @property
    def images(self) -> list[GivenImage]:
        """Its images and clips, in order."""
        return [part for turn in self.turns for part in turn.parts if not isinstance(part, str)]


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of a prompt, with what an encoder fills of them.

    Attributes:
        encoder_inputs: images, in the order of the tokens.
        continues_answer: they end with the beginning of the answer.
    """

    token_ids: Sequence[int]
    encoder_inputs: tuple[EncoderInput, ...] = ()
    continues_answer: bool = False


PromptInput: TypeAlias = Conversation | str | PromptTokens | Sequence[int] | None
"""What becomes a prompt: a conversation, a text, the prompt that the router has made of a
conversation before, or the client's token ids. None: the client has sent none."""

InputKind = Literal["chat", "text", "token_ids"]


@dataclass(frozen=True, slots=True)
class ReceivedOutput:
    """Output of one sequence that the client already has. `reason`: by which it ended, if the
    client knows of it."""

    token_ids: Sequence[int]
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Call for a generation.

    Attributes:
        model: name or alias; empty: the router's first model.
        request_id: empty: the router makes one.
        parsing: None: the output is text alone.
        images: beside a text or token ids, one for each placeholder in them.
        encoder_inputs: images that the client has preprocessed, beside token ids.
        received: output that the client already has, of each sequence; empty: none of any.
        clamps_max_tokens: more tokens than the prompt leaves of the model's length are lowered to
            these, not refused.
        content: hash of the weights that `received` is of; empty: unknown.
        cache_salt: sets its cached blocks apart from those of the tenant's other requests.
    """

    input: PromptInput
    params: SamplingParams
    model: str = ""
    request_id: str = ""
    priority: int = 0
    parsing: ParsingOptions | None = None
    images: Sequence[GivenImage] = ()
    encoder_inputs: Sequence[EncoderInput] = ()
    received: Sequence[ReceivedOutput] = ()
    clamps_max_tokens: bool = False
    cache_salt: str = ""
    content: bytes = b""

    @property
    def kind(self) -> InputKind:
        return kind_of(self.input)


def kind_of(given: PromptInput) -> InputKind:
    """Returns the kind of an input, by which errors and traces name it."""
    match given:
        case Conversation() | PromptTokens():
            return "chat"
        case str():
            return "text"
    return "token_ids"


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """Call for the embeddings of texts or token ids. `dimensions`: of the embeddings; None: all."""

    inputs: Sequence[str | Sequence[int]]
    model: str = ""
    request_id: str = ""
    priority: int = 0
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Call for the scores of pairs of texts."""

    pairs: Sequence[tuple[str, str]]
    model: str = ""
    request_id: str = ""
    priority: int = 0
