"""The client: `Client`, and `AsyncClient` with the same calls to await.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(chunk.text, end="", flush=True)

Every failed call raises a type of `baton.errors`. Nothing is repeated by itself. Building requests
and reading events is shared; the two clients differ only in how they wait.
"""

import asyncio
import dataclasses
import enum
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage

from baton.errors import BatonError, CancelledError, InternalError, InvalidArgumentError
from baton.params_wire import to_proto
from baton.rpc_errors import error_of
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2 as admin
from baton.v1 import inference_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from baton.v1.admin_pb2_grpc import AdminAsyncStub
    from baton.v1.inference_pb2_grpc import InferenceAsyncStub

_OPTIONS = [
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `role` is one the model's chat template knows."""

    role: str
    content: str


Chat: TypeAlias = Sequence[Message | Mapping[str, str]]
Prompt: TypeAlias = str | Sequence[int] | Chat
"""Text, token ids, or a conversation: messages or dicts with `role` and `content`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of one sequence and the text they complete.

    Attributes:
        text: may lag behind `token_ids`: half characters and possible stop strings are held back.
        token_ids: empty when only held-back text is delivered.
        position: of the first token in the output, from 0.
        logprobs: one for each token, in nats; empty unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    position: int
    sequence_index: int
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker the router considered. The least sum of `terms` wins; `excluded` says why not."""

    worker: str
    role: str
    terms: Mapping[str, float]
    excluded: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs. An empty `prefill_worker`: the decode worker computes the prompt."""

    prefill_worker: str
    decode_worker: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was admitted and placed."""

    request_id: str
    num_prompt_tokens: int
    placement: Placement


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    UNSPECIFIED = "unspecified"
    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"  # noqa: S105
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used; the fields are those of `baton.v1.Usage`."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_prompt_tokens: int
    num_transferred_blocks: int
    num_transferred_bytes: int
    num_reused_decode_blocks: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as the router saw them; the fields are those of `baton.v1.Timings`.

    `exposed_transfer` is None when nothing was decoded.
    """

    admission: float
    prefill_queue: float
    time_to_first_token: float
    exposed_transfer: float | None
    total: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is complete. `stop_string` is the one that ended it, else empty."""

    reason: FinishReason
    stop_string: str
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a prompt, and the text they were made from: the rendered conversation."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Model:
    """The served model; the fields are those of `baton.v1.GetModelResponse`."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the router knows it.

    `role` is "prefill" or "decode"; `state` is "ready", "draining", "unreachable" or "starting".
    """

    id: str
    role: str
    endpoint: str
    epoch: int
    state: str
    num_requests: int
    num_indexed_blocks: int


class Client:
    """Talks to one router, blocking. Safe to share between threads. Close it, or use it in `with`.

    Args:
        address: "host:port".
        timeout: seconds a call may take as a whole, unless it says otherwise.
        credentials: for TLS; without them the connection is plain.
        wait_for_ready: wait, within the timeout, for a server that is not there yet; otherwise
            `UnavailableError` at once.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout: float = 120.0,
        credentials: grpc.ChannelCredentials | None = None,
        wait_for_ready: bool = False,
    ) -> None:
        self._timeout = timeout
        self._wait = wait_for_ready
        self._channel = (
            grpc.insecure_channel(address, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _OPTIONS)
        )
        self._inference = InferenceStub(self._channel)
        self._admin = AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and every generation on it. Idempotent."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> "Generation":
        """Starts a generation. Errors of the server come when its chunks are read.

        Args:
            params: None: greedy, 16 tokens.
            model: empty: whatever is served.
            request_id: a name for `abort` and logs; empty: the router makes one.
            timeout: seconds for the whole generation; None: the client's.
        """
        request = _generate_request(prompt, params, model, request_id)
        limit = self._timeout if timeout is None else timeout
        return Generation(self._inference.Generate(request, limit, wait_for_ready=self._wait))

    def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """The tokens `generate` would make of a prompt."""
        return _tokens(self._answer(self._inference.Tokenize, _tokenize_request(prompt, model)))

    def get_model(self) -> Model:
        return _model(self._answer(self._inference.GetModel, pb.GetModelRequest()))

    def list_workers(self) -> list[Worker]:
        answer = self._answer(self._admin.ListWorkers, admin.ListWorkersRequest())
        return [_worker(worker) for worker in answer.workers]

    def abort(self, request_id: str) -> None:
        """Ends a request, whoever started it. `NotFoundError`: there is none of this name."""
        self._answer(self._admin.Abort, admin.AbortRequest(request_id=request_id))

    def _answer(
        self, method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]", request: "_Request"
    ) -> "_Response":
        try:
            return method(request, self._timeout, wait_for_ready=self._wait)
        except grpc.RpcError as error:
            raise error_of(error) from error


class AsyncClient:
    """`Client` for asyncio: the same arguments and calls. Make it where the event loop runs."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        timeout: float = 120.0,
        credentials: grpc.ChannelCredentials | None = None,
        wait_for_ready: bool = False,
    ) -> None:
        self._timeout = timeout
        self._wait = wait_for_ready
        self._channel = (
            grpc.aio.insecure_channel(address, _OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, _OPTIONS)
        )
        self._inference: InferenceAsyncStub = InferenceStub(self._channel)
        self._admin: AdminAsyncStub = AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every generation on it. Idempotent."""
        await self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> "AsyncGeneration":
        """Starts a generation, as `Client.generate`."""
        request = _generate_request(prompt, params, model, request_id)
        limit = self._timeout if timeout is None else timeout
        call = self._inference.Generate(request, timeout=limit, wait_for_ready=self._wait)
        return AsyncGeneration(call)

    async def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """The tokens `generate` would make of a prompt."""
        request = _tokenize_request(prompt, model)
        return _tokens(await self._answer(self._inference.Tokenize, request))

    async def get_model(self) -> Model:
        return _model(await self._answer(self._inference.GetModel, pb.GetModelRequest()))

    async def list_workers(self) -> list[Worker]:
        answer = await self._answer(self._admin.ListWorkers, admin.ListWorkersRequest())
        return [_worker(worker) for worker in answer.workers]

    async def abort(self, request_id: str) -> None:
        """Ends a request, whoever started it. `NotFoundError`: there is none of this name."""
        await self._answer(self._admin.Abort, admin.AbortRequest(request_id=request_id))

    async def _answer(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]", request: "_Request"
    ) -> "_Response":
        try:
            return await method(request, timeout=self._timeout, wait_for_ready=self._wait)
        except grpc.RpcError as error:
            raise error_of(error) from error


class Generation(Iterator[Chunk]):
    """A running generation: iterate over its chunks. Leaving its `with` block early cancels it."""

    def __init__(self, call: "_Call") -> None:
        self._call = call
        self._progress = _Progress()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __next__(self) -> Chunk:
        while not self._progress.unread:
            self._read_event()
        return self._progress.unread.popleft()

    @property
    def accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            self._read_event()
        return self._progress.accepted

    @property
    def finished(self) -> Finished | None:
        """How it ended; None until the last chunk has been read."""
        return self._progress.finished

    def text(self) -> str:
        """Waits for the end and returns all text, that of chunks already read included."""
        self._drain()
        return "".join(self._progress.texts)

    def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, those of chunks already read included."""
        self._drain()
        return list(self._progress.token_ids)

    def cancel(self) -> None:
        """Ends it now; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._call.cancel()

    def _drain(self) -> None:
        for _ in self:
            pass

    def _read_event(self) -> None:
        try:
            self._progress.add(next(self._call))
        except StopIteration:
            self._progress.check_complete()
            raise
        except grpc.RpcError as error:
            raise error_of(error) from error


class AsyncGeneration(AsyncIterator[Chunk]):
    """A running generation: `async for` over its chunks, once.

    Leaving its `async with` block early cancels it, and so does cancelling a task that reads it.
    """

    def __init__(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"):
        self._call = call
        self._events = aiter(call)
        self._progress = _Progress()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    async def __anext__(self) -> Chunk:
        while not self._progress.unread:
            await self._read_event()
        return self._progress.unread.popleft()

    @property
    def accepted(self) -> Accepted | None:
        """Known before the first chunk; None until then. `wait_accepted` waits for it."""
        return self._progress.accepted

    @property
    def finished(self) -> Finished | None:
        """How it ended; None until the last chunk has been read."""
        return self._progress.finished

    async def wait_accepted(self) -> Accepted:
        """Waits for the router to admit the request."""
        while self._progress.accepted is None:
            await self._read_event()
        return self._progress.accepted

    async def text(self) -> str:
        """Waits for the end and returns all text, that of chunks already read included."""
        await self._drain()
        return "".join(self._progress.texts)

    async def token_ids(self) -> list[int]:
        """Waits for the end and returns all tokens, those of chunks already read included."""
        await self._drain()
        return list(self._progress.token_ids)

    def cancel(self) -> None:
        """Ends it now; reading on raises `CancelledError`. Idempotent, and harmless at the end."""
        self._call.cancel()

    async def _drain(self) -> None:
        async for _ in self:
            pass

    async def _read_event(self) -> None:
        self._progress.check_not_failed()
        try:
            self._progress.add(await anext(self._events))
        except StopAsyncIteration:
            self._progress.check_complete()
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio says so when the call, not the task, was cancelled.
            raise self._progress.fail(CancelledError("the generation was cancelled")) from None
        except grpc.RpcError as error:
            raise self._progress.fail(error_of(error)) from error


class _Progress:
    """What the events of one stream have added up to. Waits for nothing."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.finished: Finished | None = None
        self.unread: deque[Chunk] = deque()
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self._failure: BatonError | None = None

    def add(self, event: pb.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted = _accepted(event.accepted)
        elif self.accepted is None:
            raise InternalError(f"the stream began with {kind}, not with accepted")
        elif kind == "tokens":
            self._add_chunk(_chunk(event.tokens))
        elif kind == "finished":
            self.finished = _finished(event.finished)

    def check_complete(self) -> None:
        """At the end of the stream: raises `InternalError` where it was cut."""
        if self.finished is None:
            raise InternalError("the stream ended before the generation did")

    def fail(self, error: BatonError) -> BatonError:
        """Remembers the error, for whoever reads on."""
        self._failure = error
        return error

    def check_not_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _add_chunk(self, chunk: Chunk) -> None:
        self.unread.append(chunk)
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)


class _Call(Protocol):
    """A stream of events as `grpc` gives it."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> object: ...


_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


def _generate_request(
    prompt: Prompt, params: SamplingParams | None, model: str, request_id: str
) -> pb.GenerateRequest:
    sampling = None if params is None else to_proto(params)
    request = pb.GenerateRequest(model=model, request_id=request_id, sampling=sampling)
    if isinstance(prompt, str):
        request.text = prompt
    elif not prompt:
        raise InvalidArgumentError("input", "is empty; give text, token ids or messages")
    elif isinstance(prompt[0], Message | Mapping):
        request.chat.CopyFrom(_chat(cast("Chat", prompt)))
    else:
        request.token_ids.ids.extend(_checked_ids(cast("Sequence[int]", prompt)))
    return request


def _tokenize_request(prompt: str | Chat, model: str) -> pb.TokenizeRequest:
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt)
    return pb.TokenizeRequest(model=model, chat=_chat(prompt))


def _chat(messages: Chat) -> pb.Chat:
    return pb.Chat(messages=[_chat_message(i, message) for i, message in enumerate(messages)])


def _chat_message(index: int, message: Message | Mapping[str, str]) -> pb.ChatMessage:
    field = f"chat.messages[{index}]"
    if isinstance(message, Message):
        message = {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise InvalidArgumentError(field, "must have role and content, and nothing else")
    if not all(isinstance(value, str) for value in message.values()):
        raise InvalidArgumentError(field, "role and content must be text")
    return pb.ChatMessage(role=message["role"], content=message["content"])


def _checked_ids(token_ids: Sequence[int]) -> Sequence[int]:
    for i, token_id in enumerate(token_ids):
        if not hasattr(token_id, "__index__") or not 0 <= token_id < 2**32:
            raise InvalidArgumentError(
                f"token_ids.ids[{i}]", f"is {token_id!r}; must be an integer in [0, 2^32)"
            )
    return token_ids


def _accepted(message: pb.Accepted) -> Accepted:
    placement = Placement(
        message.placement.prefill_worker,
        message.placement.decode_worker,
        tuple(_candidate(candidate) for candidate in message.placement.candidates),
    )
    return Accepted(message.request_id, message.num_prompt_tokens, placement)


def _candidate(message: pb.PlacementCandidate) -> Candidate:
    role = _lower(pb.WorkerRole.Name, message.role, "WORKER_ROLE_")
    return Candidate(message.worker, role, dict(message.terms), message.excluded)


def _chunk(message: pb.TokenChunk) -> Chunk:
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        position=message.position,
        sequence_index=message.sequence_index,
        logprobs=tuple(message.logprobs),
    )


def _finished(message: pb.Finished) -> Finished:
    reason = _lower(pb.FinishReason.Name, message.reason, "FINISH_REASON_")
    return Finished(
        reason=FinishReason(reason),
        stop_string=message.stop_string,
        usage=Usage(**_same_fields(Usage, message.usage)),
        timings=_timings(message.timings),
    )


def _timings(message: pb.Timings) -> Timings:
    exposed = message.exposed_transfer if message.HasField("exposed_transfer") else None
    return Timings(
        admission=_seconds(message.admission),
        prefill_queue=_seconds(message.prefill_queue),
        time_to_first_token=_seconds(message.time_to_first_token),
        exposed_transfer=None if exposed is None else _seconds(exposed),
        total=_seconds(message.total),
    )


def _tokens(message: pb.TokenizeResponse) -> Tokens:
    return Tokens(tuple(message.token_ids), message.text)


def _model(message: pb.GetModelResponse) -> Model:
    fields = _same_fields(Model, message)
    return Model(**{**fields, "eos_token_ids": tuple(message.eos_token_ids)})


def _worker(message: admin.WorkerInfo) -> Worker:
    role = _lower(pb.WorkerRole.Name, message.role, "WORKER_ROLE_")
    state = _lower(admin.WorkerState.Name, message.state, "WORKER_STATE_")
    return Worker(**{**_same_fields(Worker, message), "role": role, "state": state})


def _same_fields(kind: type["DataclassInstance"], message: ProtoMessage) -> dict[str, Any]:
    """The fields of `message` that the data class has, by name."""
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(kind)}


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _lower(name_of: Callable[[Any], str], value: int, prefix: str) -> str:
    """An enum value as the plain word; "unspecified" for one this client does not know yet."""
    try:
        return name_of(value).removeprefix(prefix).lower()
    except ValueError:
        return "unspecified"
