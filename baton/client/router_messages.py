"""Conversion of `baton.v1` messages to the client's data and back. Opens no connection."""

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage

from baton.client.types import (
    Accepted,
    Candidate,
    Chat,
    Chunk,
    Clip,
    Embeddings,
    EncoderChoice,
    Explanation,
    Finished,
    FinishReason,
    Image,
    Info,
    Inputs,
    Load,
    Message,
    Model,
    ModelList,
    OutputParsing,
    Part,
    Placement,
    Prompt,
    ReasoningPart,
    Received,
    RequestInfo,
    RoleBalance,
    RoleFlip,
    Scores,
    TextPart,
    Timings,
    TokenLogprobs,
    Tokens,
    Tool,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    Usage,
    Worker,
    WorkerFacts,
    WorkerMemory,
)
from baton.errors import InvalidArgumentError
from baton.rpc.params import defaults_of, params_to_message
from baton.rpc.roles import role_to_message
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2 as admin
from baton.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    _Data = TypeVar("_Data", bound=DataclassInstance)


_CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


def generate_request(
    prompt: Prompt,
    params: SamplingParams | None,
    model: str,
    request_id: str,
    priority: int,
    parsing: OutputParsing | None = None,
    images: Sequence[Image] = (),
    *,
    clamp_max_tokens: bool = False,
) -> pb.GenerateRequest:
    if not hasattr(priority, "__index__") or not -(2**31) <= priority < 2**31:
        raise InvalidArgumentError("priority", f"is {priority!r}; must be in [-2^31, 2^31)")
    sampling = None if params is None else params_to_message(params)
    request = pb.GenerateRequest(
        model=model,
        request_id=request_id,
        sampling=sampling,
        priority=priority,
        parsing=None if parsing is None else _parsing_to_message(parsing),
        images=map(_image_to_message, images),
        clamp_max_tokens=clamp_max_tokens,
    )
    if params is None or params.seed is None:  # the same wherever the request is sent again
        request.sampling.seed = secrets.randbits(64)
    _set_input(request, prompt)
    return request


def _parsing_to_message(parsing: OutputParsing) -> pb.OutputParsing:
    if parsing.tool_choice not in _CHOICES:
        raise InvalidArgumentError(
            "parsing.tool_choice",
            f"is {parsing.tool_choice!r}; must be one of {', '.join(_CHOICES)}",
        )
    choice = pb.TOOL_CHOICE_NAMED if parsing.tool_name else _CHOICES[parsing.tool_choice]
    variables = dict(parsing.template_variables)
    return pb.OutputParsing(
        tools=map(_tool_to_message, parsing.tools),
        tool_choice=choice,
        tool_name=parsing.tool_name,
        one_tool_call=parsing.one_tool_call,
        reasoning=parsing.reasoning,
        max_reasoning_tokens=parsing.max_reasoning_tokens,
        template_variables=json.dumps(variables) if variables else "",
    )


def _tool_to_message(tool: Tool) -> pb.Tool:
    return pb.Tool(
        name=tool.name,
        description=tool.description,
        parameters_json_schema="" if tool.parameters is None else json.dumps(tool.parameters),
        strict=tool.strict,
    )


def _set_input(request: pb.GenerateRequest | admin.FlushCacheRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise InvalidArgumentError("input", "is empty; give text, token ids or messages")
    elif isinstance(prompt[0], Message | Mapping):
        request.chat.CopyFrom(_chat(cast("Chat", prompt)))
    else:
        request.token_ids.ids.extend(_checked_ids(cast("Sequence[int]", prompt)))


def resumed_request(
    request: pb.GenerateRequest, accepted: Accepted | None, received: Sequence[Received]
) -> pb.GenerateRequest:
    """Returns the request for the rest of its output, with id, seed and model as accepted."""
    if accepted is None:
        return request
    resumed = pb.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.request_id = accepted.request_id
    resumed.sampling.seed = accepted.seed
    resumed.model = accepted.model or request.model
    if any(sequence.token_ids for sequence in received):
        resumed.continue_from.extend(map(_received_to_message, received))
        resumed.continue_content = accepted.content
        resumed.sampling.ClearField("prompt_logprobs")  # they came before the first token
    return resumed


def _received_to_message(received: Received) -> pb.ReceivedTokens:
    reason = pb.FinishReason.Value(f"FINISH_REASON_{received.finish_reason.name}")
    return pb.ReceivedTokens(ids=received.token_ids, finish_reason=reason)


def tokenize_request(prompt: str | Chat, model: str) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt))


def embed_request(
    inputs: Inputs,
    model: str,
    dimensions: int | None,
    request_id: str,
    priority: int,
) -> pb.EmbedRequest:
    return pb.EmbedRequest(
        model=model,
        request_id=request_id,
        inputs=map(_embed_input, [inputs] if isinstance(inputs, str) else inputs),
        dimensions=dimensions,
        priority=priority,
    )


def _embed_input(given: str | Sequence[int]) -> pb.EmbedInput:
    if isinstance(given, str):
        return pb.EmbedInput(text=given)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=_checked_ids(given)))


def embeddings_of(message: pb.EmbedResponse) -> Embeddings:
    vectors = tuple(tuple(embedding.values) for embedding in message.embeddings)
    return Embeddings(vectors, message.model, message.num_prompt_tokens)


def score_request(
    pairs: Sequence[tuple[str, str]], model: str, request_id: str, priority: int
) -> pb.ScoreRequest:
    return pb.ScoreRequest(
        model=model,
        request_id=request_id,
        pairs=[pb.TextPair(first=first, second=second) for first, second in pairs],
        priority=priority,
    )


def scores_of(message: pb.ScoreResponse) -> Scores:
    return Scores(tuple(message.scores), message.model, message.num_prompt_tokens)


def _chat(messages: Chat) -> pb.Chat:
    return pb.Chat(messages=[_chat_message(i, message) for i, message in enumerate(messages)])


def _chat_message(index: int, message: Message | Mapping[str, str]) -> pb.ChatMessage:
    field = f"chat.messages[{index}]"
    if isinstance(message, Message):
        is_text = isinstance(message.content, str)
        return pb.ChatMessage(
            role=message.role,
            content=message.content if isinstance(message.content, str) else "",
            parts=() if is_text else map(_part_to_message, message.content),
            tool_calls=map(_tool_call_to_message, message.tool_calls),
            tool_call_id=message.tool_call_id,
            name=message.name,
            reasoning=message.reasoning,
        )
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidArgumentError(field, "must have role and content, and nothing else")
    if not all(isinstance(value, str) for value in message.values()):
        raise InvalidArgumentError(field, "role and content must be text")
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _part_to_message(part: str | Image | Clip) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if isinstance(part, Clip):
        return pb.ContentPart(clip=_image_to_message(part))
    return pb.ContentPart(image=_image_to_message(part))


def _image_to_message(image: Image | Clip) -> pb.Image:
    if isinstance(image.source, str):
        return pb.Image(url=image.source)
    return pb.Image(data=image.source)


def _tool_call_to_message(call: ToolCall) -> pb.ToolCall:
    return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def _checked_ids(token_ids: Sequence[int]) -> Sequence[int]:
    for i, token_id in enumerate(token_ids):
        if not hasattr(token_id, "__index__") or not 0 <= token_id < 2**32:
            raise InvalidArgumentError(
                f"token_ids.ids[{i}]", f"is {token_id!r}; must be an integer in [0, 2^32)"
            )
    return token_ids


def explain_request(
    prompt: Prompt, params: SamplingParams | None, model: str, request_id: str
) -> admin.ExplainPlacementRequest:
    request = generate_request(prompt, params, model, request_id, 0)
    return admin.ExplainPlacementRequest(request=request)


def flush_cache_request(prompt: Prompt | None, model: str = "") -> admin.FlushCacheRequest:
    request = admin.FlushCacheRequest(model=model)
    if prompt is not None:
        _set_input(request, prompt)
    return request


def set_role_request(worker: str, role: str) -> admin.SetRoleRequest:
    return admin.SetRoleRequest(worker=worker, role=role_to_message(role))


def accepted_of(message: pb.Accepted) -> Accepted:
    return _plain(Accepted, message, placement=_placement(message.placement))


def explanation_of(message: admin.ExplainPlacementResponse) -> Explanation:
    return _plain(Explanation, message, placement=_placement(message.placement))


def _placement(message: pb.Placement) -> Placement:
    candidates = tuple(map(_candidate, message.candidates))
    encoders = tuple(
        _plain(EncoderChoice, each, terms=dict(each.terms)) for each in message.encoders
    )
    return _plain(Placement, message, candidates=candidates, encoders=encoders)


def _candidate(message: pb.PlacementCandidate) -> Candidate:
    role = _lower(pb.WorkerRole.Name, message.role, "WORKER_ROLE_")
    return _plain(Candidate, message, role=role, terms=dict(message.terms))


def chunk_of(message: pb.TokenChunk) -> Chunk:
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        position=message.position,
        sequence_index=message.sequence_index,
        logprobs=tuple(message.logprobs),
        top_logprobs=tuple(map(_top_of, message.top_logprobs)),
        finish_reason=_finish_reason(message.finish_reason),
        parts=tuple(map(_part_of, message.parts)),
    )


def _part_of(message: pb.OutputPart) -> Part:
    match message.WhichOneof("part"):
        case "reasoning":
            return ReasoningPart(message.reasoning)
        case "tool_call_start":
            start = message.tool_call_start
            return ToolCallStart(start.index, start.id, start.name)
        case "tool_call_arguments":
            arguments = message.tool_call_arguments
            return ToolCallArguments(arguments.index, arguments.json)
    return TextPart(message.text)


def prompt_logprobs_of(message: pb.PromptLogprobs) -> list[TokenLogprobs]:
    tops = list(map(_top_of, message.top_logprobs)) or [{} for _ in message.logprobs]
    return list(map(TokenLogprobs, message.logprobs, tops))


def _top_of(message: pb.TopLogprobs) -> dict[int, float]:
    return dict(zip(message.token_ids, message.logprobs, strict=True))


def finished_of(message: pb.Finished) -> Finished:
    return _plain(
        Finished,
        message,
        reason=_finish_reason(message.reason),
        usage=_plain(Usage, message.usage),
        timings=_timings(message.timings),
        score=message.score if message.HasField("score") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
    )


def _finish_reason(value: int) -> FinishReason:
    return FinishReason(_lower(pb.FinishReason.Name, value, "FINISH_REASON_"))


def _timings(message: pb.Timings) -> Timings:
    exposed = message.exposed_transfer if message.HasField("exposed_transfer") else None
    return Timings(
        admission=_seconds(message.admission),
        prefill_queue=_seconds(message.prefill_queue),
        time_to_first_token=_seconds(message.time_to_first_token),
        exposed_transfer=None if exposed is None else _seconds(exposed),
        total=_seconds(message.total),
    )


def tokens_of(message: pb.TokenizeResponse) -> Tokens:
    return Tokens(tuple(message.token_ids), message.text)


def model_of(message: pb.GetModelResponse) -> Model:
    return _plain(
        Model,
        message,
        eos_token_ids=tuple(message.eos_token_ids),
        pooled_output=_pooled_output(message.pooled_output),
        sampling_defaults=defaults_of(message.sampling_defaults),
    )


def _pooled_output(message: pb.PooledOutput.ValueType) -> str:
    name = _lower(pb.PooledOutput.Name, message, "POOLED_OUTPUT_")
    return "" if name == "unspecified" else name


def models_of(message: pb.ListModelsResponse) -> ModelList:
    aliases = {alias.name: dict(alias.weights) for alias in message.aliases}
    return ModelList(tuple(map(model_of, message.models)), aliases)


def workers_of(message: admin.ListWorkersResponse) -> list[Worker]:
    return list(map(_worker, message.workers))


def _worker(message: admin.WorkerInfo) -> Worker:
    role = _lower(pb.WorkerRole.Name, message.role, "WORKER_ROLE_")
    state = _lower(admin.WorkerState.Name, message.state, "WORKER_STATE_")
    pooled_output = _pooled_output(message.pooled_output)
    return _plain(
        Worker,
        message,
        role=role,
        state=state,
        pooled_output=pooled_output,
        step_seconds=_seconds(message.step_time),
    )


def memory_of(message: admin.GetMemoryResponse) -> list[WorkerMemory]:
    return [_plain(WorkerMemory, worker) for worker in message.workers]


def requests_of(message: admin.ListRequestsResponse) -> list[RequestInfo]:
    return list(map(_request_info, message.requests))


def _request_info(message: admin.RequestInfo) -> RequestInfo:
    has_token = message.HasField("time_to_first_token")
    return _plain(
        RequestInfo,
        message,
        age=_seconds(message.age),
        phase=_lower(admin.RequestPhase.Name, message.phase, "REQUEST_PHASE_"),
        time_to_first_token=_seconds(message.time_to_first_token) if has_token else None,
    )


def role_balance_of(message: admin.GetRoleBalanceResponse) -> RoleBalance:
    proposal = None
    if message.HasField("proposal"):
        role = _lower(pb.WorkerRole.Name, message.proposal.role, "WORKER_ROLE_")
        proposal = RoleFlip(message.proposal.worker, role)
    return _plain(RoleBalance, message, proposal=proposal)


def load_of(message: admin.GetLoadResponse) -> Load:
    state = _lower(admin.WorkerState.Name, message.state, "WORKER_STATE_")
    return _plain(Load, message, state=state)


def info_of(message: admin.GetInfoResponse) -> Info:
    worker = message.worker if message.HasField("worker") else None
    return Info(
        versions=dict(message.versions),
        unix_time=message.unix_time_ms / 1000,
        redis=_lower(admin.RedisState.Name, message.redis, "REDIS_STATE_"),
        worker=None if worker is None else _plain(WorkerFacts, worker),
        refused_records=dict(message.refused_records),
    )


def _plain(kind: type["_Data"], message: ProtoMessage, **given: Any) -> "_Data":
    """Returns a data class with the `given` fields, and all others as `message` has them."""
    names = {field.name for field in dataclasses.fields(kind)} - given.keys()
    return kind(**{name: getattr(message, name) for name in names}, **given)


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _lower(name_of: Callable[[Any], str], value: int, prefix: str) -> str:
    """Returns an enum value as a plain word; "unspecified" for one unknown to this client."""
    try:
        return name_of(value).removeprefix(prefix).lower()
    except ValueError:
        return "unspecified"
