"""Python client of a router: `Client`, and `AsyncClient` with the same calls to await.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(chunk.text, end="", flush=True)

Every failed call raises a type of `baton.errors`. A generation whose router is lost resumes on
another one, or on the same if gRPC dropped its call; of several routers the first that answers is
used. No other call is retried.
The two clients differ only in how they wait.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, Self, TypeAlias, TypeVar

import grpc

from baton.client import rpcs
from baton.client.connections import AsyncConnections, BlockingConnections, Connections
from baton.client.generation import AsyncGeneration, Calls, Generation
from baton.client.resume import CallAttempt, Failover, Resumption, Routers
from baton.client.router_messages import generate_request
from baton.client.rpcs import Rpc
from baton.client.types import (
    Accepted,
    Candidate,
    Chat,
    Chunk,
    Clip,
    Completion,
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
    WorkerMemory,
)
from baton.errors import BatonError, CancelledError, InvalidArgumentError
from baton.rpc.cancellation import is_task_cancelled
from baton.rpc.tls import Tls
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncGeneration",
    "Candidate",
    "Chat",
    "Chunk",
    "Client",
    "Clip",
    "Completion",
    "EarlyStopping",
    "Embeddings",
    "EncoderChoice",
    "Explanation",
    "FinishReason",
    "Finished",
    "Generation",
    "Grammar",
    "GrammarKind",
    "Image",
    "Info",
    "Inputs",
    "Load",
    "Message",
    "Model",
    "OutputParsing",
    "Part",
    "Placement",
    "Prompt",
    "ReasoningPart",
    "RequestInfo",
    "RoleBalance",
    "RoleFlip",
    "SamplingParams",
    "Scores",
    "TextPart",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "Tokens",
    "Tool",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallStart",
    "Usage",
    "Worker",
    "WorkerMemory",
]

Metadata: TypeAlias = Sequence[tuple[str, str]]
"""gRPC metadata: names, in lower case, and values."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_AnyGeneration = TypeVar("_AnyGeneration", Generation, AsyncGeneration)
_AnyConnections = TypeVar("_AnyConnections", bound=Connections[Any])


class _BaseClient(Generic[_AnyConnections, _AnyGeneration]):
    """Configuration of either client and its generations; unary calls are added by each."""

    _connections_type: type[_AnyConnections]
    _generation_type: Callable[..., _AnyGeneration]

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        timeout: float = 120.0,
        tls: Tls | None = None,
        wait_for_ready: bool = False,
        resume: bool = True,
        admin_address: str | Sequence[str] | None = None,
        token: str | None = None,
    ) -> None:
        addresses, admin_addresses = _addresses(address, admin_address)
        self._timeout = timeout
        self._wait_for_ready = wait_for_ready
        self._resume = resume
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._connections = self._connections_type(addresses, admin_addresses, tls)
        self._routers = Routers(len(addresses), have_names=any(map(_is_name, addresses)))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout: float | None = None,
        metadata: Metadata = (),
        parsing: OutputParsing | None = None,
        images: Sequence[Image] = (),
        clamp_max_tokens: bool = False,
    ) -> _AnyGeneration:
        """Starts a generation. Errors of the server are raised when its chunks are read.

        Args:
            params: None: greedy, 16 tokens.
            model: name or alias; empty: the first of `list_models`.
            request_id: a name for `abort` and logs; empty: the router makes one.
            priority: workers that schedule by priority serve smaller ones first.
            timeout: seconds for the whole generation; None: the client's.
            metadata: sent with each of its calls, such as `traceparent`, which makes the request
                part of a trace of the caller's.
            parsing: tools of the model, and parsing of its output; None: the output is text alone.
            images: of a prompt that is text or token ids, which has the model's placeholder for
                each. Those of a conversation are in its messages.
            clamp_max_tokens: lower `params.max_tokens` to what the prompt leaves of the model's
                length, instead of refusing more.
        """

        def open_attempt(attempt: CallAttempt) -> Any:
            with self._cancelled_by_close():
                if attempt.reconnects:
                    self._connections.reconnect(attempt.router)
                call = self._connections[attempt.router].inference.Generate
                return call(attempt.request, **self._options(attempt.timeout, metadata))

        request = generate_request(
            prompt,
            params,
            model,
            request_id,
            priority,
            parsing,
            images,
            clamp_max_tokens=clamp_max_tokens,
        )
        limit = self._timeout if timeout is None else timeout
        resumption = Resumption(request, self._routers, limit, wait_for_ready=self._wait_for_ready)
        return self._generation_type(
            open_attempt(resumption.first_attempt()),
            1 if params is None else params.n,
            Calls(resumption, open_attempt) if self._resume else None,
        )

    @contextmanager
    def _cancelled_by_close(self) -> Iterator[None]:
        """Raises `CancelledError` for a call on connections that were or are closed, for which gRPC
        has errors of several types. Connections are looked up inside: TLS files that have changed
        would open closed ones again."""
        if self._routers.is_closed:
            raise CancelledError("the client is closed")
        try:
            yield
        except (BatonError, grpc.RpcError):
            raise
        except (Exception, asyncio.CancelledError) as error:
            is_of_task = isinstance(error, asyncio.CancelledError) and is_task_cancelled()
            if is_of_task or not self._routers.is_closed:
                raise
            raise CancelledError("the client is closed") from error

    def _options(self, timeout: float, metadata: Metadata = ()) -> dict[str, Any]:
        """Returns the options of a call on a stub. With several routers none waits for one of them;
        generations wait for any."""
        return {
            "timeout": timeout,
            "metadata": (*self._metadata, *metadata),
            "wait_for_ready": self._wait_for_ready and self._routers.num_routers == 1,
        }


class Client(_BaseClient[BlockingConnections, Generation]):
    """Blocking client of one router, or of any of several. Thread-safe. Close it, or use it in
    `with`.

    Args:
        address: "host:port"; of several routers, in the order in which they are tried. A name may
            lead to several routers, and to others later.
        timeout: seconds per call as a whole, unless the call sets its own.
        tls: TLS files, reloaded after they have changed; None: plaintext.
        wait_for_ready: wait, within the timeout, for a server that does not listen yet; otherwise
            raise `UnavailableError` at once. With several routers, generations wait for any of
            them, other calls for none.
        resume: resume a generation whose router dies on another one, or on the same one if it
            restarts soon; its reader notices only the delay.
        admin_address: addresses of the routers' admin services, in the same order: their
            --admin-port. None: `address`, for a client that only administers.
        token: bearer token that names the caller to the router; without TLS it is sent in
            plaintext.
    """

    _connections_type = BlockingConnections
    _generation_type = Generation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. Calls and generations in progress, and later ones, raise
        `CancelledError`. Idempotent."""
        self._routers.is_closed = True
        self._connections.close()

    def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """Returns the tokens that `generate` would make of a prompt."""
        return self._call(rpcs.TOKENIZE, prompt, model)

    def embed(
        self,
        inputs: Inputs,
        *,
        model: str = "",
        dimensions: int | None = None,
        request_id: str = "",
        priority: int = 0,
    ) -> Embeddings:
        """Returns the embedding of each input, of an embedding model.

        Args:
            inputs: texts or lists of token ids; a single text is one input.
            dimensions: length of the embeddings, of which the first values are taken and normalized
                again; None: all.
        """
        return self._call(rpcs.EMBED, inputs, model, dimensions, request_id, priority)

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
    ) -> Scores:
        """Returns the score of each pair of texts: that of the model's classification head, in
        [0, 1], or the cosine of the two embeddings."""
        return self._call(rpcs.SCORE, pairs, model, request_id, priority)

    def get_model(self, model: str = "") -> Model:
        """Returns a served model and its limits; the first one if `model` is empty."""
        return self._call(rpcs.GET_MODEL, model=model)

    def list_models(self) -> ModelList:
        """Returns the served models and their aliases."""
        return self._call(rpcs.LIST_MODELS)

    def list_workers(self) -> list[Worker]:
        """Returns the workers that the router knows."""
        return self._call(rpcs.LIST_WORKERS)

    def list_requests(self, limit: int = 20) -> list[RequestInfo]:
        """Returns the requests that the router serves now for the caller's tenant, oldest first, at
        most 1000."""
        return self._call(rpcs.LIST_REQUESTS, limit=limit)

    def explain(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
    ) -> Explanation:
        """Explains where `generate` would run this now, and why. Nothing is run or counted."""
        return self._call(rpcs.EXPLAIN, prompt, params, model, request_id)

    def explain_request(self, request_id: str) -> Explanation:
        """Explains the placement of a recent request. `NotFoundError`: none of this id is known."""
        return self._call(rpcs.EXPLAIN_REQUEST, request_id=request_id)

    def get_load(self) -> Load:
        """Returns the load of the process at this address. Workers answer even while starting."""
        return self._call(rpcs.GET_LOAD)

    def get_info(self) -> Info:
        """Returns versions, clock and Redis state of the process at this address."""
        return self._call(rpcs.GET_INFO)

    def get_memory(self) -> list[WorkerMemory]:
        """Returns the use of the KV memory of each serving worker."""
        return self._call(rpcs.GET_MEMORY)

    def role_balance(self, model: str = "") -> RoleBalance:
        """Returns the loads of the pools of a model, and the role change that would balance them,
        if any. `model`: empty: the first one."""
        return self._call(rpcs.ROLE_BALANCE, model=model)

    def set_role(self, worker: str, role: str) -> int:
        """Drains a worker and makes it an "encode", "prefill" or "decode" worker; returns the epoch
        of the new role. `DeadlineExceededError`: its calls in flight did not end in time."""
        return self._call(rpcs.SET_ROLE, worker, role)

    def pause_admission(self) -> int:
        """Pauses admission in the process at this address: new requests wait until
        `resume_admission`, up to their deadlines. Returns the number that waits already."""
        return self._call(rpcs.PAUSE_ADMISSION)

    def resume_admission(self) -> int:
        """Resumes admission; returns the number of requests that waited."""
        return self._call(rpcs.RESUME_ADMISSION)

    def flush_cache(self, prompt: Prompt | None = None, *, model: str = "") -> int:
        """Drops the cached blocks of a prompt on all workers; None: all cached prefixes. Returns
        the number of blocks dropped. `UnavailableError` names the workers that have not flushed.
        `model`: on whose workers; empty: the first one for a prompt, else all models."""
        return self._call(rpcs.FLUSH_CACHE, prompt, model)

    def abort(self, request_id: str) -> None:
        """Ends a request of any client. `NotFoundError`: no request has this id."""
        self._call(rpcs.ABORT, request_id=request_id)

    def _call(
        self,
        rpc: Rpc[_Arguments, Any, Any, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        request = rpc.request(*args, **kwargs)
        failover = Failover(self._routers, rpc.failover_codes)
        while True:
            try:
                with self._cancelled_by_close():
                    call = rpc.method(self._connections[failover.router])
                    return rpc.parse(call(request, **self._options(self._timeout)))
            except grpc.RpcError as error:
                failover.advance(error)


class AsyncClient(_BaseClient[AsyncConnections, AsyncGeneration]):
    """Client for asyncio: `Client`'s arguments and calls. Make it where the event loop runs."""

    _connections_type = AsyncConnections
    _generation_type = AsyncGeneration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections. Calls and generations in progress, and later ones, raise
        `CancelledError`. Idempotent."""
        self._routers.is_closed = True
        await self._connections.close()

    async def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """Returns the tokens that `generate` would make of a prompt."""
        return await self._call(rpcs.TOKENIZE, prompt, model)

    async def embed(
        self,
        inputs: Inputs,
        *,
        model: str = "",
        dimensions: int | None = None,
        request_id: str = "",
        priority: int = 0,
    ) -> Embeddings:
        """Returns the embedding of each input, of an embedding model.

        Args:
            inputs: texts or lists of token ids; a single text is one input.
            dimensions: length of the embeddings, of which the first values are taken and normalized
                again; None: all.
        """
        return await self._call(rpcs.EMBED, inputs, model, dimensions, request_id, priority)

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
    ) -> Scores:
        """Returns the score of each pair of texts: that of the model's classification head, in
        [0, 1], or the cosine of the two embeddings."""
        return await self._call(rpcs.SCORE, pairs, model, request_id, priority)

    async def get_model(self, model: str = "") -> Model:
        """Returns a served model and its limits; the first one if `model` is empty."""
        return await self._call(rpcs.GET_MODEL, model=model)

    async def list_models(self) -> ModelList:
        """Returns the served models and their aliases."""
        return await self._call(rpcs.LIST_MODELS)

    async def list_workers(self) -> list[Worker]:
        """Returns the workers that the router knows."""
        return await self._call(rpcs.LIST_WORKERS)

    async def list_requests(self, limit: int = 20) -> list[RequestInfo]:
        """Returns the requests that the router serves now, as `Client.list_requests`."""
        return await self._call(rpcs.LIST_REQUESTS, limit=limit)

    async def explain(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
    ) -> Explanation:
        """Explains where `generate` would run this now, and why. Nothing is run or counted."""
        return await self._call(rpcs.EXPLAIN, prompt, params, model, request_id)

    async def explain_request(self, request_id: str) -> Explanation:
        """Explains the placement of a recent request. `NotFoundError`: none of this id is known."""
        return await self._call(rpcs.EXPLAIN_REQUEST, request_id=request_id)

    async def get_load(self) -> Load:
        """Returns the load of the process at this address. Workers answer even while starting."""
        return await self._call(rpcs.GET_LOAD)

    async def get_info(self) -> Info:
        """Returns versions, clock and Redis state of the process at this address."""
        return await self._call(rpcs.GET_INFO)

    async def get_memory(self) -> list[WorkerMemory]:
        """Returns the use of the KV memory of each serving worker, as `Client.get_memory`."""
        return await self._call(rpcs.GET_MEMORY)

    async def role_balance(self, model: str = "") -> RoleBalance:
        """Returns the loads of the pools of a model, and the role change that would balance them,
        if any. `model`: empty: the first one."""
        return await self._call(rpcs.ROLE_BALANCE, model=model)

    async def set_role(self, worker: str, role: str) -> int:
        """Drains a worker and changes its role, as `Client.set_role`."""
        return await self._call(rpcs.SET_ROLE, worker, role)

    async def pause_admission(self) -> int:
        """Pauses admission in the process at this address, as `Client.pause_admission`."""
        return await self._call(rpcs.PAUSE_ADMISSION)

    async def resume_admission(self) -> int:
        """Resumes admission; returns the number of requests that waited."""
        return await self._call(rpcs.RESUME_ADMISSION)

    async def flush_cache(self, prompt: Prompt | None = None, *, model: str = "") -> int:
        """Drops the cached blocks of a prompt, or of all, as `Client.flush_cache`."""
        return await self._call(rpcs.FLUSH_CACHE, prompt, model)

    async def abort(self, request_id: str) -> None:
        """Ends a request of any client. `NotFoundError`: no request has this id."""
        await self._call(rpcs.ABORT, request_id=request_id)

    async def _call(
        self,
        rpc: Rpc[_Arguments, Any, Any, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        request = rpc.request(*args, **kwargs)
        failover = Failover(self._routers, rpc.failover_codes)
        while True:
            try:
                with self._cancelled_by_close():
                    call: Any = rpc.method(self._connections[failover.router])
                    return rpc.parse(await call(request, **self._options(self._timeout)))
            except grpc.RpcError as error:
                failover.advance(error)


def _addresses(
    address: str | Sequence[str], admin_address: str | Sequence[str] | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the addresses of the routers, and of their admin services."""
    addresses = [address] if isinstance(address, str) else address
    if not addresses:
        raise InvalidArgumentError("address", "is empty; give one router at least")
    if admin_address is None:
        return addresses, addresses
    admins = [admin_address] if isinstance(admin_address, str) else admin_address
    if len(admins) != len(addresses):
        problem = f"has {len(admins)} addresses; must have one for each of {len(addresses)} routers"
        raise InvalidArgumentError("admin_address", problem)
    return addresses, admins


def _is_name(address: str) -> bool:
    """Returns whether an address is to be resolved, such as "name:port" or "dns:///name:port"."""
    last = address.rpartition("/")[2]
    hosts = last.strip("[]"), last.rpartition(":")[0].strip("[]")  # without a port, and with one
    return not (address.startswith("unix:") or "localhost" in hosts or any(map(_is_ip, hosts)))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
