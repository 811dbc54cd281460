"""Python client of a router: `Client`, and `AsyncClient` with the same calls to await.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(chunk.text, end="", flush=True)

Every failed call raises a type of `baton.errors`. A generation whose router is lost resumes on
another one; of several routers the first that answers is used. No other call is retried.
The two clients differ only in how they wait.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

import grpc

from baton.client.generation import AsyncGeneration, Call, Calls, Generation
from baton.client.links import Links, Stubs
from baton.client.resume import CallAttempt, Resumption, Routers, is_silence
from baton.client.types import (
    Accepted,
    Candidate,
    Chat,
    Chunk,
    Completion,
    Explanation,
    Finished,
    FinishReason,
    Info,
    Load,
    Message,
    Model,
    Placement,
    Prompt,
    RequestInfo,
    RoleBalance,
    RoleFlip,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
    Worker,
)
from baton.client.wire import (
    explanation_of,
    generate_request,
    info_of,
    load_of,
    model_of,
    request_info_of,
    role_balance_of,
    tokenize_request,
    tokens_of,
    worker_of,
)
from baton.errors import InvalidArgumentError
from baton.role_wire import role_to_message
from baton.rpc_errors import error_of
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams
from baton.tls import Pem, Tls
from baton.v1 import admin_pb2 as admin
from baton.v1 import inference_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from baton.v1.admin_pb2_grpc import AdminAsyncStub
    from baton.v1.inference_pb2_grpc import InferenceAsyncStub

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncGeneration",
    "Candidate",
    "Chat",
    "Chunk",
    "Client",
    "Completion",
    "EarlyStopping",
    "Explanation",
    "FinishReason",
    "Finished",
    "Generation",
    "Grammar",
    "GrammarKind",
    "Info",
    "Load",
    "Message",
    "Model",
    "Placement",
    "Prompt",
    "RequestInfo",
    "RoleBalance",
    "RoleFlip",
    "SamplingParams",
    "Timings",
    "Tls",
    "TokenLogprobs",
    "Tokens",
    "Usage",
    "Worker",
]

_OPTIONS = [
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.enable_http_proxy", 0),
    # Finds a server soon that starts late or restarts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Detects a router that falls silent during a call within some seconds.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.http2.ping_timeout_ms", 2000),
    ("grpc.http2.max_pings_without_data", 0),
]

_LONGEST_CALL_SECONDS = 24 * 3600.0

# Codes after which the next router is asked: it may know more.
_ELSEWHERE = (grpc.StatusCode.NOT_FOUND,)

Metadata: TypeAlias = Sequence[tuple[str, str]]
"""gRPC metadata: names, in lower case, and values."""

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class Client:
    """Blocking client of one router, or of any of several. Thread-safe. Close it, or use it in
    `with`.

    Args:
        address: "host:port"; of several routers, in the order in which they are tried.
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
        self._timeout = timeout
        self._waits = wait_for_ready
        self._resume = resume
        self._metadata = _bearing(token)
        addresses, admin_addresses = _addresses(address, admin_address)
        options = _OPTIONS if tls is None else [*_OPTIONS, *tls.channel_options()]

        def open_channel(address: str, pem: Pem | None) -> grpc.Channel:
            if pem is None:
                return grpc.insecure_channel(address, options)
            return grpc.secure_channel(address, pem.channel_credentials(), options)

        # A replaced channel closes by itself, once its last call is garbage-collected.
        everywhere = {*addresses, *admin_addresses}
        self._channels = Links(everywhere, tls, open_channel, retire=lambda _: None)
        self._routers = Routers(len(addresses))
        self._wait = wait_for_ready and len(addresses) == 1
        self._inference = Stubs(self._channels, addresses, InferenceStub)
        self._admin = Stubs(self._channels, admin_addresses, AdminStub)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and ends every generation on them. Idempotent."""
        self._routers.is_closed = True
        for channel in self._channels.all:
            channel.close()

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
    ) -> Generation:
        """Starts a generation. Errors of the server are raised when its chunks are read.

        Args:
            params: None: greedy, 16 tokens.
            model: empty: the served model.
            request_id: a name for `abort` and logs; empty: the router makes one.
            priority: workers that schedule by priority serve smaller ones first.
            timeout: seconds for the whole generation; None: the client's.
            metadata: sent with each of its calls, such as `traceparent`, which makes the request
                part of a trace of the caller's.
        """
        request = generate_request(prompt, params, model, request_id, priority)
        limit = self._timeout if timeout is None else timeout
        resumption = Resumption(request, self._routers, limit, waits=self._waits)
        open_attempt = partial(self._open, metadata=metadata)
        calls = Calls(resumption, open_attempt) if self._resume else None
        return Generation(open_attempt(resumption.first_attempt()), _num_returned(params), calls)

    def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """Returns the tokens that `generate` would make of a prompt."""
        request = tokenize_request(prompt, model)
        return tokens_of(self._answer(lambda i: self._inference[i].Tokenize, request))

    def get_model(self) -> Model:
        request = pb.GetModelRequest()
        return model_of(self._answer(lambda i: self._inference[i].GetModel, request))

    def list_workers(self) -> list[Worker]:
        request = admin.ListWorkersRequest()
        answer = self._answer(lambda i: self._admin[i].ListWorkers, request)
        return [worker_of(worker) for worker in answer.workers]

    def list_requests(self, limit: int = 20) -> list[RequestInfo]:
        """Returns the requests that the router serves now for the caller's tenant, oldest first, at
        most 1000."""
        request = admin.ListRequestsRequest(limit=limit)
        answer = self._answer(lambda i: self._admin[i].ListRequests, request)
        return [request_info_of(one) for one in answer.requests]

    def explain(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
    ) -> Explanation:
        """Explains where `generate` would run this now, and why. Nothing is run or counted."""
        subject = generate_request(prompt, params, model, request_id, 0)
        request = admin.ExplainPlacementRequest(request=subject)
        return explanation_of(self._answer(lambda i: self._admin[i].ExplainPlacement, request))

    def explain_request(self, request_id: str) -> Explanation:
        """Explains the placement of a recent request. `NotFoundError`: none of this id is known."""
        request = admin.ExplainPlacementRequest(request_id=request_id)
        return explanation_of(
            self._answer(lambda i: self._admin[i].ExplainPlacement, request, _ELSEWHERE)
        )

    def get_load(self) -> Load:
        """Returns the load of the process at this address. Workers answer even while starting."""
        request = admin.GetLoadRequest()
        return load_of(self._answer(lambda i: self._admin[i].GetLoad, request))

    def get_info(self) -> Info:
        """Returns versions, clock and Redis state of the process at this address."""
        return info_of(self._answer(lambda i: self._admin[i].GetInfo, admin.GetInfoRequest()))

    def role_balance(self) -> RoleBalance:
        """Returns the loads of both pools, and the role change that would balance them, if any."""
        request = admin.GetRoleBalanceRequest()
        return role_balance_of(self._answer(lambda i: self._admin[i].GetRoleBalance, request))

    def set_role(self, worker: str, role: str) -> int:
        """Drains a worker and makes it a "prefill" or "decode" worker; returns the epoch of the new
        role. `DeadlineExceededError`: its calls in flight did not end in time."""
        request = admin.SetRoleRequest(worker=worker, role=role_to_message(role))
        return self._answer(lambda i: self._admin[i].SetRole, request).epoch

    def flush_cache(self) -> int:
        """Evicts all cached prefixes that no request uses; returns the number of their blocks."""
        request = admin.FlushCacheRequest()
        return self._answer(lambda i: self._admin[i].FlushCache, request).num_blocks

    def abort(self, request_id: str) -> None:
        """Ends a request of any client. `NotFoundError`: no request has this id."""
        request = admin.AbortRequest(request_id=request_id)
        self._answer(lambda i: self._admin[i].Abort, request, _ELSEWHERE)

    def _open(self, attempt: CallAttempt, metadata: Metadata) -> Call:
        stub = self._inference[attempt.router]
        metadata = (*self._metadata, *metadata)
        return stub.Generate(
            attempt.request, attempt.timeout, metadata=metadata, wait_for_ready=self._wait
        )

    def _answer(
        self,
        method_of: "Callable[[int], grpc.UnaryUnaryMultiCallable[_Request, _Response]]",
        request: _Request,
        also: Collection[grpc.StatusCode] = (),
    ) -> _Response:
        """Returns the first answer of any router; errors with a code in `also` do not count."""
        router = self._routers.first
        for is_last in _turns(self._routers.number):
            try:
                return method_of(router)(
                    request, self._timeout, metadata=self._metadata, wait_for_ready=self._wait
                )
            except grpc.RpcError as error:
                self._routers.note(router, error)
                if is_last or not (is_silence(error) or error.code() in also):
                    raise error_of(error) from error
                router = self._routers.after(router)
        raise AssertionError("a turn is the last one")


class AsyncClient:
    """Client for asyncio: `Client`'s arguments and calls. Make it where the event loop runs."""

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
        self._timeout = timeout
        self._waits = wait_for_ready
        self._resume = resume
        self._metadata = _bearing(token)
        addresses, admin_addresses = _addresses(address, admin_address)
        options = _OPTIONS if tls is None else [*_OPTIONS, *tls.channel_options()]

        def open_channel(address: str, pem: Pem | None) -> grpc.aio.Channel:
            if pem is None:
                return grpc.aio.insecure_channel(address, options)
            return grpc.aio.secure_channel(address, pem.channel_credentials(), options)

        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        everywhere = {*addresses, *admin_addresses}
        self._channels = Links(everywhere, tls, open_channel, self._retire)
        self._routers = Routers(len(addresses))
        self._wait = wait_for_ready and len(addresses) == 1
        self._inference: Stubs[grpc.aio.Channel, InferenceAsyncStub] = Stubs(
            self._channels, addresses, InferenceStub
        )
        self._admin: Stubs[grpc.aio.Channel, AdminAsyncStub] = Stubs(
            self._channels, admin_addresses, AdminStub
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections and ends every generation on them. Idempotent."""
        self._routers.is_closed = True
        former = [*self._retiring.values()]
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in (*self._channels.all, *former)))

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
    ) -> AsyncGeneration:
        """Starts a generation, as `Client.generate`."""
        request = generate_request(prompt, params, model, request_id, priority)
        limit = self._timeout if timeout is None else timeout
        resumption = Resumption(request, self._routers, limit, waits=self._waits)
        open_attempt = partial(self._open, metadata=metadata)
        calls = Calls(resumption, open_attempt) if self._resume else None
        return AsyncGeneration(
            open_attempt(resumption.first_attempt()), _num_returned(params), calls
        )

    async def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """Returns the tokens that `generate` would make of a prompt."""
        request = tokenize_request(prompt, model)
        return tokens_of(await self._answer(lambda i: self._inference[i].Tokenize, request))

    async def get_model(self) -> Model:
        request = pb.GetModelRequest()
        return model_of(await self._answer(lambda i: self._inference[i].GetModel, request))

    async def list_workers(self) -> list[Worker]:
        request = admin.ListWorkersRequest()
        answer = await self._answer(lambda i: self._admin[i].ListWorkers, request)
        return [worker_of(worker) for worker in answer.workers]

    async def list_requests(self, limit: int = 20) -> list[RequestInfo]:
        """Returns the requests that the router serves now, as `Client.list_requests`."""
        request = admin.ListRequestsRequest(limit=limit)
        answer = await self._answer(lambda i: self._admin[i].ListRequests, request)
        return [request_info_of(one) for one in answer.requests]

    async def explain(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
    ) -> Explanation:
        """Explains where `generate` would run this now, and why. Nothing is run or counted."""
        subject = generate_request(prompt, params, model, request_id, 0)
        request = admin.ExplainPlacementRequest(request=subject)
        answer = await self._answer(lambda i: self._admin[i].ExplainPlacement, request)
        return explanation_of(answer)

    async def explain_request(self, request_id: str) -> Explanation:
        """Explains the placement of a recent request. `NotFoundError`: none of this id is known."""
        request = admin.ExplainPlacementRequest(request_id=request_id)
        return explanation_of(
            await self._answer(lambda i: self._admin[i].ExplainPlacement, request, _ELSEWHERE)
        )

    async def get_load(self) -> Load:
        """Returns the load of the process at this address. Workers answer even while starting."""
        request = admin.GetLoadRequest()
        return load_of(await self._answer(lambda i: self._admin[i].GetLoad, request))

    async def get_info(self) -> Info:
        """Returns versions, clock and Redis state of the process at this address."""
        request = admin.GetInfoRequest()
        return info_of(await self._answer(lambda i: self._admin[i].GetInfo, request))

    async def role_balance(self) -> RoleBalance:
        """Returns the loads of both pools, and the role change that would balance them, if any."""
        request = admin.GetRoleBalanceRequest()
        return role_balance_of(await self._answer(lambda i: self._admin[i].GetRoleBalance, request))

    async def set_role(self, worker: str, role: str) -> int:
        """Drains a worker and changes its role, as `Client.set_role`."""
        request = admin.SetRoleRequest(worker=worker, role=role_to_message(role))
        return (await self._answer(lambda i: self._admin[i].SetRole, request)).epoch

    async def flush_cache(self) -> int:
        """Evicts all cached prefixes that no request uses; returns the number of their blocks."""
        request = admin.FlushCacheRequest()
        return (await self._answer(lambda i: self._admin[i].FlushCache, request)).num_blocks

    async def abort(self, request_id: str) -> None:
        """Ends a request of any client. `NotFoundError`: no request has this id."""
        request = admin.AbortRequest(request_id=request_id)
        await self._answer(lambda i: self._admin[i].Abort, request, _ELSEWHERE)

    def _retire(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.create_task(channel.close(_LONGEST_CALL_SECONDS))
        self._retiring[task] = channel
        task.add_done_callback(self._retiring.pop)

    def _open(
        self, attempt: CallAttempt, metadata: Metadata
    ) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        stub = self._inference[attempt.router]
        metadata = (*self._metadata, *metadata)
        return stub.Generate(
            attempt.request, timeout=attempt.timeout, metadata=metadata, wait_for_ready=self._wait
        )

    async def _answer(
        self,
        method_of: "Callable[[int], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]]",
        request: _Request,
        also: Collection[grpc.StatusCode] = (),
    ) -> _Response:
        """Returns the first answer of any router; errors with a code in `also` do not count."""
        router = self._routers.first
        for is_last in _turns(self._routers.number):
            try:
                return await method_of(router)(
                    request,
                    timeout=self._timeout,
                    metadata=self._metadata,
                    wait_for_ready=self._wait,
                )
            except grpc.RpcError as error:
                self._routers.note(router, error)
                if is_last or not (is_silence(error) or error.code() in also):
                    raise error_of(error) from error
                router = self._routers.after(router)
        raise AssertionError("a turn is the last one")


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


def _bearing(token: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call: the bearer token, if any."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


def _turns(number: int) -> list[bool]:
    """Returns a flag for each router, True for the last."""
    return [i == number - 1 for i in range(number)]


def _num_returned(params: SamplingParams | None) -> int:
    return 1 if params is None else params.n
