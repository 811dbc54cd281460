"""The routes of the HTTP front, which takes what OpenAI's clients send.

It is an edge: what it reads becomes the same messages that come in over gRPC, and goes the same way
(`baton_router.lifecycle.inference`).
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.serving.access import Access
from baton.serving.telemetry.scrape_server import Render
from baton.serving.telemetry.serving import PATH as METRICS_PATH
from baton.serving.tenant import Caller, Tenants
from baton.v1 import inference_pb2 as pb
from baton_router.admission.rate_limit import RateLimits
from baton_router.http.body import parse, read_body
from baton_router.http.caller import HttpCaller
from baton_router.http.errors import limit_headers
from baton_router.http.exchange import Exchange
from baton_router.http.generation import Generations
from baton_router.http.middleware import Failures, while_connected
from baton_router.http.page import PAGE, PAGE_HEADERS
from baton_router.http.sampling import in_their_words
from baton_router.http.schemas import ChatRequest, CompletionRequest, GenerationRequest
from baton_router.lifecycle.in_flight import Requests
from baton_router.lifecycle.inference import Inference

_INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name

_Asked = TypeVar("_Asked", bound=GenerationRequest)
_Make = Callable[[_Asked, Caller], Awaitable[Exchange]]


class _Answer(Response):
    """Writes itself, as long as there is somebody to read it."""

    def __init__(self, exchange: Exchange, more_headers: Callable[[], dict[str, str]]) -> None:
        """`more_headers`: of the answer, asked for when it begins."""
        super().__init__()
        self._exchange = exchange
        self._more_headers = more_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(k.encode(), v.encode()) for k, v in self._more_headers().items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await while_connected(receive, self._exchange.write(send_with_headers))


class Routes:
    """Each method is a route.

    Args:
        render_metrics: None: they are turned off.
        max_body_bytes: of a request.
        access: of whom certificates are asked; None: of nobody.
    """

    def __init__(
        self,
        inference: Inference,
        generations: Generations,
        requests: Requests,
        tenants: Tenants,
        limits: RateLimits,
        render_metrics: Render | None,
        max_body_bytes: int,
        access: Access | None = None,
    ) -> None:
        self._inference = inference
        self._generations = generations
        self._requests = requests
        self._tenants = tenants
        self._limits = limits
        self._render_metrics = render_metrics
        self._max_body_bytes = max_body_bytes
        self._access = access
        self._created = int(time.time())

    def app(self) -> FastAPI:
        """The application. It describes itself in the README; pages that would describe it load
        what they show from elsewhere."""
        app = FastAPI(title="Baton", openapi_url=None)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.model)
        app.add_api_route("/health", self.health)
        if self._render_metrics is not None:
            app.add_api_route(METRICS_PATH, self.metrics)
        app.add_api_route("/", self.page)
        app.add_exception_handler(HTTPException, _raise)
        app.add_middleware(Failures)
        return app

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self._generations.complete)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, self._generations.chat)

    async def models(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request, name: str) -> Response:
        self._caller(request)
        if name != self._inference.card.name:
            served = self._inference.card.name
            raise InvalidArgumentError("model", f"is {name!r}; this router serves {served!r}")
        return JSONResponse(self._model())

    async def health(self) -> Response:
        """As gRPC's health of the name `readiness`."""
        if self._requests.is_draining:
            raise UnavailableError("the router is draining; another one will serve")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """As at the router's `--metrics-port`, to those who may ask for anything here."""
        self._caller(request)
        assert self._render_metrics is not None, "a route that is not there"
        body, content_type = self._render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def page(self) -> Response:
        return Response(PAGE, headers=PAGE_HEADERS)

    async def _generate(
        self, request: Request, schema: type[_Asked], make: "_Make[_Asked]"
    ) -> Response:
        # Who is nobody's, or over its tenant's limit, is told so before it is read on.
        caller = self._caller(request)
        tenant = self._tenants.of(caller).name
        self._limits.check(tenant)
        if self._requests.is_draining:
            raise UnavailableError("the router is draining; another one will serve this")
        try:
            exchange = await self._exchange(request, schema, make, caller)
        except BatonError:
            self._limits.count_request(tenant)  # one that is no good has cost something, too
            raise
        return _Answer(exchange, lambda: limit_headers(self._limits.statuses(tenant)))

    async def _exchange(
        self, request: Request, schema: type[_Asked], make: "_Make[_Asked]", caller: Caller
    ) -> Exchange:
        """Of what the request has in its body."""
        body = await read_body(request.stream(), request.headers, self._max_body_bytes)
        asked = parse(body, schema)
        try:
            return await make(asked, caller)
        except InvalidArgumentError as error:
            raise in_their_words(error, asked) from error

    def _caller(self, request: Request) -> Caller:
        """Raises `UnauthenticatedError` or `PermissionDeniedError` for whom nothing is here."""
        caller = HttpCaller(request)
        if self._access is not None:
            self._access.check(caller, _INFERENCE)
        self._tenants.of(caller)
        return caller

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._inference.card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": self._inference.max_model_len,
            "has_chat_template": self._inference.card.chat_template is not None,
        }


async def _raise(_request: Request, error: Exception) -> Response:
    """Past FastAPI's own answer, to where all failures end."""
    raise error
