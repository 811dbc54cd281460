"""The client: `Client`, and `AsyncClient` with the same calls to await.

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(chunk.text, end="", flush=True)

Every failed call raises a type of `baton.errors`. Nothing is repeated by itself. The two clients
differ only in how they wait.
"""

from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from baton.client_types import (
    Accepted,
    Candidate,
    Chat,
    Chunk,
    Completion,
    Finished,
    FinishReason,
    Load,
    Message,
    Model,
    Placement,
    Prompt,
    Timings,
    TokenLogprobs,
    Tokens,
    Usage,
    Worker,
)
from baton.client_wire import (
    generate_request,
    load_of,
    model_of,
    tokenize_request,
    tokens_of,
    worker_of,
)
from baton.generation import AsyncGeneration, Generation
from baton.rpc_errors import error_of
from baton.sampling import EarlyStopping, Grammar, GrammarKind, SamplingParams
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
    "FinishReason",
    "Finished",
    "Generation",
    "Grammar",
    "GrammarKind",
    "Load",
    "Message",
    "Model",
    "Placement",
    "Prompt",
    "SamplingParams",
    "Timings",
    "TokenLogprobs",
    "Tokens",
    "Usage",
    "Worker",
]

_OPTIONS = [
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.enable_http_proxy", 0),
    # A server that was not there yet, or restarts, is found at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


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
        priority: int = 0,
        timeout: float | None = None,
    ) -> Generation:
        """Starts a generation. Errors of the server come when its chunks are read.

        Args:
            params: None: greedy, 16 tokens.
            model: empty: whatever is served.
            request_id: a name for `abort` and logs; empty: the router makes one.
            priority: workers that schedule by priority serve smaller ones first.
            timeout: seconds for the whole generation; None: the client's.
        """
        request = generate_request(prompt, params, model, request_id, priority)
        limit = self._timeout if timeout is None else timeout
        call = self._inference.Generate(request, limit, wait_for_ready=self._wait)
        return Generation(call, _num_returned(params))

    def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """The tokens `generate` would make of a prompt."""
        return tokens_of(self._answer(self._inference.Tokenize, tokenize_request(prompt, model)))

    def get_model(self) -> Model:
        return model_of(self._answer(self._inference.GetModel, pb.GetModelRequest()))

    def list_workers(self) -> list[Worker]:
        answer = self._answer(self._admin.ListWorkers, admin.ListWorkersRequest())
        return [worker_of(worker) for worker in answer.workers]

    def get_load(self) -> Load:
        """What the process at this address is doing. Workers answer too, while starting also."""
        return load_of(self._answer(self._admin.GetLoad, admin.GetLoadRequest()))

    def flush_cache(self) -> int:
        """Forgets all cached prefixes that no request uses; returns how many blocks they had."""
        return self._answer(self._admin.FlushCache, admin.FlushCacheRequest()).num_blocks

    def abort(self, request_id: str) -> None:
        """Ends a request, whoever started it. `NotFoundError`: there is none of this name."""
        self._answer(self._admin.Abort, admin.AbortRequest(request_id=request_id))

    def _answer(
        self, method: "grpc.UnaryUnaryMultiCallable[_Request, _Response]", request: _Request
    ) -> _Response:
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
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncGeneration:
        """Starts a generation, as `Client.generate`."""
        request = generate_request(prompt, params, model, request_id, priority)
        limit = self._timeout if timeout is None else timeout
        call = self._inference.Generate(request, timeout=limit, wait_for_ready=self._wait)
        return AsyncGeneration(call, _num_returned(params))

    async def tokenize(self, prompt: str | Chat, *, model: str = "") -> Tokens:
        """The tokens `generate` would make of a prompt."""
        request = tokenize_request(prompt, model)
        return tokens_of(await self._answer(self._inference.Tokenize, request))

    async def get_model(self) -> Model:
        return model_of(await self._answer(self._inference.GetModel, pb.GetModelRequest()))

    async def list_workers(self) -> list[Worker]:
        answer = await self._answer(self._admin.ListWorkers, admin.ListWorkersRequest())
        return [worker_of(worker) for worker in answer.workers]

    async def get_load(self) -> Load:
        """What the process at this address is doing. Workers answer too, while starting also."""
        return load_of(await self._answer(self._admin.GetLoad, admin.GetLoadRequest()))

    async def flush_cache(self) -> int:
        """Forgets all cached prefixes that no request uses; returns how many blocks they had."""
        answer = await self._answer(self._admin.FlushCache, admin.FlushCacheRequest())
        return answer.num_blocks

    async def abort(self, request_id: str) -> None:
        """Ends a request, whoever started it. `NotFoundError`: there is none of this name."""
        await self._answer(self._admin.Abort, admin.AbortRequest(request_id=request_id))

    async def _answer(
        self, method: "grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]", request: _Request
    ) -> _Response:
        try:
            return await method(request, timeout=self._timeout, wait_for_ready=self._wait)
        except grpc.RpcError as error:
            raise error_of(error) from error


def _num_returned(params: SamplingParams | None) -> int:
    return 1 if params is None else params.n
