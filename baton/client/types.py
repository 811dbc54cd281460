"""Data types of the client: requests and events. Independent of protobuf and connections."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from baton.sampling import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call of the model. `arguments` is the text of a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Image:
    """Image of a prompt.

    Attributes:
        source: encoded file (PNG, JPEG, WebP or GIF), or a URL.
    """

    source: bytes | str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Clip:
    """Clip in a conversation, whose frames become images: some of them, evenly spaced.

    Attributes:
        source: encoded file (an animated GIF, WebP or PNG), or a URL.
    """

    source: bytes | str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a conversation.

    Attributes:
        role: one that the model's chat template knows.
        content: text, or texts, images and clips in order.
        tool_calls: made by the model in this message.
        tool_call_id: of the call whose result this message is.
        name: of the author, or of the tool whose result this is.
        reasoning: of the model before `content`.
    """

    role: str
    content: str | Sequence[str | Image | Clip]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


Chat: TypeAlias = Sequence[Message | Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text, token ids, or a conversation: messages or dicts with `role` and `content`."""
Inputs: TypeAlias = str | Sequence[str | Sequence[int]]
"""Texts or lists of token ids to embed; a single text is one input."""


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool that the model may call: a function.

    Attributes:
        parameters: JSON schema of the arguments, an object; None: any object.
        strict: the arguments of each call are valid under the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


ToolChoice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class OutputParsing:
    """Tools of the model, and parsing of its output into text, reasoning and tool calls.

    Attributes:
        tools: described to the model by its chat template, if the prompt is a conversation.
        tool_choice: auto: the model decides whether to call tools. required: it makes one call at
            least. none: it gets no tools.
        tool_name: the tool that must be called; empty: any.
        one_tool_call: at most one call.
        reasoning: reasoning becomes parts of its own; else it is text.
        max_reasoning_tokens: after which reasoning is ended; None: no limit.
        template_variables: further variables of the chat template, such as `enable_thinking`.
    """

    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""
    one_tool_call: bool = False
    reasoning: bool = True
    max_reasoning_tokens: int | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text for the user, which continues the text before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Reasoning, which continues the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Beginning of the tool call `index` of its sequence, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Piece of the arguments of the tool call `index`: JSON text, which continues what came
    before."""

    index: int
    json: str


Part: TypeAlias = TextPart | ReasoningPart | ToolCallStart | ToolCallArguments


class FinishReason(enum.StrEnum):
    """Reason for which a sequence ended."""

    UNSPECIFIED = "unspecified"
    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"  # noqa: S105
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence, and the text they complete.

    Attributes:
        text: may lag behind `token_ids`: half characters and possible stop strings are held back.
        token_ids: empty when only held-back text is delivered.
        position: of the first token in the output, from 0.
        sequence_index: index of the sequence in the request, from 0.
        logprobs: one for each token, in nats; empty unless asked for.
        top_logprobs: for each token the most likely ones in its place with their log-probabilities,
            the most likely first; empty unless asked for.
        finish_reason: reason for which the sequence is complete with the last of `token_ids`;
            UNSPECIFIED if it continues, or if only `Finished` has the reason.
        parts: of the parsed output, which may lag behind `text`; empty unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    position: int
    sequence_index: int
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    finish_reason: FinishReason = FinishReason.UNSPECIFIED
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Received:
    """Output of one sequence so far.

    Attributes:
        finish_reason: as it came with the last token.
    """

    token_ids: Sequence[int]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token in nats, and those of the most likely ones in its place, the most
    likely first."""

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Worker that the router considered. The least sum of `terms` wins, unless `excluded` is set.

    Attributes:
        num_cached_tokens: leading tokens of the prompt that it probably has cached.
        computes_prompt: it is considered as a decode worker that computes the prompt itself.
    """

    worker: str
    role: str
    terms: Mapping[str, float]
    excluded: str
    num_cached_tokens: int = 0
    computes_prompt: bool = False

    @property
    def cost(self) -> float:
        """Sum of its terms: seconds under the default policy."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """Source of one encoder output, such as that of an image, that the computing worker lacks.

    Attributes:
        input: index of the encoder input in the prompt.
        worker: worker from which the output is fetched; empty if the computing worker encodes the
            input itself.
        only_cached: that worker has the output cached, and computes nothing.
        terms: seconds until the output is there, by name.
    """

    input: int
    num_tokens: int
    worker: str = ""
    only_cached: bool = False
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers of a request.

    Attributes:
        prefill_worker: empty if the decode worker computes the prompt.
        candidates: the chosen workers; in an `Explanation` all workers, the cheapest first.
        prefix_source: worker from which the prefill worker fetches a cached prefix of the prompt;
            empty if it computes all that it lacks.
        encoders: sources of the encoder outputs that the computing worker lacks.
    """

    prefill_worker: str
    decode_worker: str
    candidates: tuple[Candidate, ...]
    prefix_source: str = ""
    encoders: tuple[EncoderChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of a placement, made or hypothetical.

    Attributes:
        num_tokens: tokens to place: the prompt, and output that came before.
        placement: names no workers if none can be chosen.
        reason: why the winner won and by how much, as sentences.
    """

    request_id: str
    num_tokens: int
    policy: str
    placement: Placement
    reason: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Acceptance: the request was admitted and placed.

    Attributes:
        seed: the one in use; a resumed request sends it again.
        model: name of the model that answers; empty: an older router has not said it.
        content: hash of its weights; a resumed request sends it again. Empty: unknown.
    """

    request_id: str
    num_prompt_tokens: int
    placement: Placement
    seed: int = 0
    model: str = ""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a request, all its sequences together; the fields are those of `baton.v1.Usage`."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_prompt_tokens: int
    num_transferred_blocks: int
    num_transferred_bytes: int
    num_reused_decode_blocks: int
    num_migrations: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds, measured by the router; the fields are those of `baton.v1.Timings`.

    `exposed_transfer` is None when nothing was decoded.
    """

    admission: float
    prefill_queue: float
    time_to_first_token: float
    exposed_transfer: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Finished:
    """End of one sequence.

    Attributes:
        stop_string: the one that ended it, else empty.
        stop_token_id: the one of `stop_token_ids` that ended it; None for any other end.
        usage, timings: of the whole request so far; complete with its last sequence.
        score: by which beams are ranked; None without beams.
    """

    reason: FinishReason
    stop_string: str
    usage: Usage
    timings: Timings
    sequence_index: int = 0
    score: float | None = None
    stop_token_id: int | None = None

    @property
    def stop_reason(self) -> str | int | None:
        """Stop string or stop token that ended it; None for any other end."""
        return self.stop_string or self.stop_token_id


@dataclass(frozen=True, slots=True)
class Completion:
    """Complete output of one sequence: the fields of `Chunk`, and its `Finished`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[Mapping[int, float], ...]
    finished: Finished
    parts: tuple[Part, ...] = ()

    @property
    def content(self) -> str:
        """Text for the user: `text` without reasoning and tool calls, if parsing was asked for."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def reasoning(self) -> str:
        """Reasoning of the model."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningPart))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls, in order."""
        calls: list[ToolCall] = []
        for part in self.parts:
            if isinstance(part, ToolCallStart):
                calls.append(ToolCall(part.id, part.name, ""))
            elif isinstance(part, ToolCallArguments):
                call = calls[part.index]
                calls[part.index] = replace(call, arguments=call.arguments + part.json)
        return tuple(calls)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of a prompt, and the text they were made from: the rendered conversation."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of several inputs, in their order.

    Attributes:
        model: name of the model that answered.
        num_prompt_tokens: tokens of all inputs.
    """

    vectors: tuple[tuple[float, ...], ...]
    model: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of several pairs of texts, in their order.

    Attributes:
        model: name of the model that answered.
        num_prompt_tokens: tokens of all prompts.
    """

    scores: tuple[float, ...]
    model: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Model:
    """Served model; the fields are those of `baton.v1.GetModelResponse`.

    `pooled_output` is "embedding" or "score" for a model that makes these; empty: it generates.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: str
    has_workers: bool = False
    pooled_output: str = ""
    takes_images: bool = False
    sampling_defaults: SamplingDefaults = NO_DEFAULTS


@dataclass(frozen=True, slots=True)
class ModelList:
    """Served models and their aliases.

    Attributes:
        models: the first one answers requests that name none.
        aliases: weights of the models of each alias.
    """

    models: tuple[Model, ...]
    aliases: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Worker:
    """Worker as the router sees it.

    `role` is "encode", "prefill" or "decode"; `state` is "ready", "draining", "unreachable" or
    "starting". `version` is that of Baton; empty: unknown. `pooled_output` is that of its `Model`.
    `step_seconds` is the mean of its recent engine steps, 0 before the first report; `slowness` the
    factor by which they took longer than its peers take for the same work.
    """

    id: str
    role: str
    endpoint: str
    epoch: int
    state: str
    num_requests: int
    num_indexed_hashes: int
    admin_endpoint: str
    version: str
    model: str = ""
    pooled_output: str = ""
    step_seconds: float = 0.0
    slowness: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Use of a worker's KV memory; the fields are those of `baton.v1.WorkerMemory`."""

    worker: str
    block_size: int
    pool_bytes: int
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_saved_blocks: int
    num_unused_tokens: int
    num_reserved_tokens: int
    host_pool_bytes: int
    num_host_blocks: int
    num_held_host_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Request that a router serves; the fields are those of `baton.v1.RequestInfo`.

    `phase` is "waiting", "prefill" or "decode". Times are in seconds; `time_to_first_token` is None
    while there is no token.
    """

    request_id: str
    age: float
    phase: str
    num_prompt_tokens: int
    num_output_tokens: int
    prefill_worker: str
    decode_worker: str
    time_to_first_token: float | None
    num_migrations: int
    model: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts of a worker, by which workers pair to exchange blocks; the fields are those of
    `baton.v1.WorkerFacts`."""

    id: str
    model: str
    fingerprint: bytes
    layouts: str
    kv_endpoint: str
    device: str
    content: bytes = b""
    max_model_len: int = 0
    num_pool_tokens: int = 0
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Info:
    """Build info of one process, and its view of Redis and of its model.

    Attributes:
        versions: of "baton", "python" and of libraries, by name.
        unix_time: of its clock, in seconds since 1970.
        redis: state of its Redis: "none", "answering" or "silent".
        worker: None for a router, and for a worker that has not loaded its model.
        refused_records: reasons why a router refuses records in Redis, by worker id.
    """

    versions: Mapping[str, str]
    unix_time: float
    redis: str
    worker: WorkerFacts | None
    refused_records: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoleFlip:
    """Proposed role change: a worker, and the role that it should have."""

    worker: str
    role: str


@dataclass(frozen=True, slots=True)
class RoleBalance:
    """Loads of the pools, as a router sees them.

    Attributes:
        prefill_pressure, decode_pressure, encode_pressure: above 1 the pool is overloaded
            (`baton.v1.GetRoleBalanceResponse`).
        proposal: the change that would help; None: none is proposed.
        reason: of the proposal or of none, as a sentence.
        is_elastic: the router carries out what it proposes.
    """

    prefill_pressure: float
    decode_pressure: float
    proposal: RoleFlip | None
    reason: str
    is_elastic: bool
    model: str = ""
    encode_pressure: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one process; the fields are those of `baton.v1.GetLoadResponse`.

    `state` as in `Worker`; `phase` and `progress` in [0, 1] describe the start while "starting".
    """

    state: str
    phase: str
    progress: float
    num_waiting: int
    num_running: int
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_leases: int
    num_preemptions: int
    num_promised_blocks: int
    num_steps: int
    num_computed_tokens: int = 0
    num_pulled_tokens: int = 0
    num_returns: int = 0
    num_transferred_bytes: int = 0
    num_transfers: int = 0
    num_failed_transfers: int = 0
    is_paused: bool = False
    idle_since_unix_ms: int = 0
    num_loaded_bytes: int = 0
    num_weight_bytes: int = 0
    num_encode_jobs: int = 0
    num_waiting_encode_jobs: int = 0
    num_waiting_encoder_tokens: int = 0
    num_encoder_blocks: int = 0
    num_held_encoder_blocks: int = 0
    num_cached_encoder_blocks: int = 0
