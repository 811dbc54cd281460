"""Routes of the HTTP API: OpenAI's, and Anthropic's for messages.

Requests become the same calls as those over gRPC, and are served by the same pipeline
(`baton_router.lifecycle.inference`). Each route has the table by which its API names fields in
errors.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError, InvalidArgumentError, UnavailableError
from baton.rpc.cancellation import run_until
from baton.serving.grpc.access import INFERENCE, Access
from baton.serving.telemetry.scrape_server import Render
from baton.serving.telemetry.serving import PATH as METRICS_PATH
from baton.serving.tenant import Caller, Tenants
from baton.version import version
from baton_router.apis.answers.http_call import HttpCall
from baton_router.apis.anthropic.answer_schemas import MessageBody, MessageErrorBody, TokenCount
from baton_router.apis.anthropic.conversion import MESSAGES
from baton_router.apis.anthropic.errors import VERSION as ANTHROPIC_VERSION
from baton_router.apis.anthropic.errors import error_format
from baton_router.apis.anthropic.messages import Messages
from baton_router.apis.anthropic.schemas import Conversation, MessagesRequest
from baton_router.apis.edge.allowed_hosts import AllowedHosts
from baton_router.apis.edge.body.bodies import Bodies
from baton_router.apis.edge.body.field_names import FieldNames, InTerms
from baton_router.apis.edge.caller import HttpCaller
from baton_router.apis.edge.cors import cors
from baton_router.apis.edge.endpoints import EVENTS, JSON, Endpoint, openapi, refusing
from baton_router.apis.edge.errors import limit_headers
from baton_router.apis.edge.middleware import (
    REQUEST_ID,
    AnswerHeaders,
    Failures,
    Observed,
    disconnected,
)
from baton_router.apis.openai.answer_schemas import (
    ChatCompletion,
    Completion,
    Health,
    ModelEntry,
    ModelList,
)
from baton_router.apis.openai.embeddings import PooledHttpCall, PooledOutputs
from baton_router.apis.openai.field_names import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANKS,
    SCORES,
)
from baton_router.apis.openai.generations import Generations
from baton_router.apis.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    TokenizeRequest,
    TokenizeResponse,
    VersionResponse,
)
from baton_router.apis.page.page import page_response
from baton_router.apis.responses.answer_schemas import DeletedResponse, InputTokens, ResponseBody
from baton_router.apis.responses.conversion import RESPONSES
from baton_router.apis.responses.input_items import ItemList
from baton_router.apis.responses.responses import Responses
from baton_router.apis.responses.schemas import ResponsesRequest
from baton_router.lifecycle.in_flight import Requests
from baton_router.routing.admission.rate_limit import RateLimits
from baton_router.routing.admission.readiness import RouterReadiness
from baton_router.served.served_models import Models, ServedModel
from baton_router.telemetry.call_observer import CallObserver

# Whose answers lack the documents, as those of Cohere.
_COHERE_RERANK = "/v2/rerank"

_Body = TypeVar("_Body", bound=Struct)
_Made = TypeVar("_Made")
_Make = Callable[[_Body, Caller], Awaitable[_Made]]
_Parsed = tuple[_Made, InTerms, str]


class _Answer(Response):
    """Response that makes a call of a request's body and writes its answer. It is cancelled when
    the client disconnects."""

    def __init__(
        self,
        parsed: "AbstractAsyncContextManager[_Parsed[HttpCall | PooledHttpCall]]",
        more_headers: Callable[[str], dict[str, str]],
    ) -> None:
        """Adds the result of `more_headers`, called with the tenant when the answer begins, to its
        headers. `parsed` is left once the requests of the call are made."""
        super().__init__()
        self._parsed = parsed
        self._more_headers = more_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as body:
            call, in_terms, tenant = await body.enter_async_context(self._parsed)
            scope[REQUEST_ID] = call.request_id

            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    more = [(k.encode(), v.encode()) for k, v in self._more_headers(tenant).items()]
                    message = {**message, "headers": [*message["headers"], *more]}
                await send(message)

            with _naming(in_terms):
                writing = call.write(send_with_headers, in_terms, body)
                await run_until(writing, disconnected(receive))


class Routes:
    """Routes of the HTTP API; each method is one.

    Args:
        render_metrics: None if metrics are turned off.
        bodies: reads the bodies of requests.
        hosts: names in host headers that are served; see `AllowedHosts`.
        origins: of web pages that may read answers; see `cors`.
        access: checks client certificates; None: none are required.
    """

    def __init__(
        self,
        models: Models,
        generations: Generations,
        responses: Responses,
        messages: Messages,
        pooled: PooledOutputs,
        requests: Requests,
        readiness: RouterReadiness,
        tenants: Tenants,
        limits: RateLimits,
        observer: CallObserver,
        render_metrics: Render | None,
        bodies: Bodies,
        access: Access | None = None,
        hosts: Collection[str] = ("*",),
        origins: str | None = None,
    ) -> None:
        self._models = models
        self._generations = generations
        self._responses = responses
        self._messages = messages
        self._pooled = pooled
        self._requests = requests
        self._readiness = readiness
        self._tenants = tenants
        self._limits = limits
        self._observer = observer
        self._render_metrics = render_metrics
        self._bodies = bodies
        self._access = access
        self._hosts = hosts
        self._origins = origins
        self._created = int(time.time())

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        endpoints = self._endpoints()
        self._document = openapi(endpoints)
        middleware = [
            *cors(self._origins),
            Middleware(AnswerHeaders),
            Middleware(Failures, error_format),
            Middleware(Observed, self._observer),
            Middleware(AllowedHosts, self._hosts),
        ]
        return Starlette(
            routes=[endpoint.route for endpoint in endpoints],
            middleware=middleware,
            exception_handlers={HTTPException: refusing(endpoints)},
        )

    def _endpoints(self) -> list[Endpoint]:
        both, text = (JSON, EVENTS), ("text/plain",)
        found = [
            Endpoint(
                "POST",
                "/v1/completions",
                self.completions,
                "Continues texts",
                CompletionRequest,
                Completion,
                both,
            ),
            Endpoint(
                "POST",
                "/v1/chat/completions",
                self.chat_completions,
                "Answers a conversation",
                ChatRequest,
                ChatCompletion,
                both,
            ),
            Endpoint(
                "POST",
                "/v1/responses",
                self.create_response,
                "Creates a response",
                ResponsesRequest,
                ResponseBody,
                both,
            ),
            Endpoint(
                "GET",
                "/v1/responses/{id}",
                self.response,
                "Returns a stored response",
                answer=ResponseBody,
            ),
            Endpoint(
                "DELETE",
                "/v1/responses/{id}",
                self.delete_response,
                "Deletes a stored response",
                answer=DeletedResponse,
            ),
            Endpoint(
                "GET",
                "/v1/responses/{id}/input_items",
                self.input_items,
                "Lists the items of a stored response's input",
                answer=ItemList,
            ),
            Endpoint(
                "POST",
                "/v1/responses/input_tokens",
                self.input_tokens,
                "Counts the tokens of a response's input",
                ResponsesRequest,
                InputTokens,
            ),
            Endpoint(
                "POST",
                "/v1/messages",
                self.create_message,
                "Answers a conversation, in Anthropic's format",
                MessagesRequest,
                MessageBody,
                both,
                MessageErrorBody,
            ),
            Endpoint(
                "POST",
                "/v1/messages/count_tokens",
                self.count_tokens,
                "Counts the tokens of a conversation in Anthropic's format",
                Conversation,
                TokenCount,
                error=MessageErrorBody,
            ),
            Endpoint(
                "POST",
                "/v1/embeddings",
                self.embeddings,
                "Computes the embeddings of texts",
                EmbeddingRequest,
                EmbeddingResponse,
            ),
            Endpoint(
                "POST",
                "/v1/score",
                self.score,
                "Scores pairs of texts",
                ScoreRequest,
                ScoreResponse,
            ),
            *(
                Endpoint(
                    "POST",
                    path,
                    self.rerank,
                    "Sorts documents by their relevance to a query",
                    RerankRequest,
                    RerankResponse,
                )
                for path in ("/rerank", "/v1/rerank", _COHERE_RERANK)
            ),
            Endpoint("GET", "/v1/models", self.models, "Lists the models", answer=ModelList),
            Endpoint(
                "GET",
                "/v1/models/{name:path}",
                self.model,
                "Describes a model",
                answer=ModelEntry,
            ),
            Endpoint(
                "POST",
                "/tokenize",
                self.tokenize,
                "Tokenizes a prompt or a conversation",
                TokenizeRequest,
                TokenizeResponse,
            ),
            Endpoint(
                "POST",
                "/detokenize",
                self.detokenize,
                "Returns the text of tokens",
                DetokenizeRequest,
                DetokenizeResponse,
            ),
            Endpoint(
                "GET",
                "/version",
                self.version,
                "Returns the version of the router",
                answer=VersionResponse,
            ),
            Endpoint("GET", "/health", self.health, "Reports readiness", answer=Health),
            Endpoint("GET", "/ping", self.health, "Reports readiness", answer=Health),
            Endpoint("GET", "/openapi.json", self.openapi, "Returns this document"),
            Endpoint(
                "GET", "/", self.page, "Serves a page to try the model", media_types=("text/html",)
            ),
        ]
        if self._render_metrics is not None:
            found.append(
                Endpoint("GET", METRICS_PATH, self.metrics, "Serves the metrics", media_types=text)
            )
        return found

    async def completions(self, request: Request) -> Response:
        return await self._generate(
            request, CompletionRequest, self._generations.complete, COMPLETIONS
        )

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, self._generations.chat, CHAT_COMPLETIONS)

    async def create_response(self, request: Request) -> Response:
        return await self._generate(request, ResponsesRequest, self._responses.create, RESPONSES)

    async def response(self, request: Request) -> Response:
        """Returns a stored response."""
        caller = self._counted(request)
        if request.query_params.get("stream") == "true":
            problem = "is true; expected false: a stored response has no events. Leave it out."
            raise InvalidArgumentError("stream", problem)
        content = await self._responses.get(request.path_params["id"], caller)
        return Response(content, media_type="application/json")

    async def delete_response(self, request: Request) -> Response:
        """Deletes a stored response."""
        answer = await self._responses.delete(request.path_params["id"], self._counted(request))
        return JSONResponse(answer)

    async def input_items(self, request: Request) -> Response:
        """Lists the items of a stored response's input."""
        response_id, caller = request.path_params["id"], self._counted(request)
        items = await self._responses.input_items(response_id, request.query_params, caller)
        return Response(msgspec.json.encode(items), media_type=JSON)

    async def input_tokens(self, request: Request) -> Response:
        """Counts the tokens of a prompt of the Responses API."""
        make = self._responses.count_tokens
        num_tokens, headers = await self._compute(request, ResponsesRequest, make, RESPONSES)
        answer = {"object": "response.input_tokens", "input_tokens": num_tokens}
        return JSONResponse(answer, headers=headers)

    async def create_message(self, request: Request) -> Response:
        return await self._generate(request, MessagesRequest, self._messages.create, MESSAGES)

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of a prompt of the Messages API."""
        make = self._messages.count_tokens
        num_tokens, headers = await self._compute(request, Conversation, make, MESSAGES)
        return JSONResponse({"input_tokens": num_tokens}, headers=headers)

    async def embeddings(self, request: Request) -> Response:
        return await self._generate(request, EmbeddingRequest, self._pooled.embed, EMBEDDINGS)

    async def score(self, request: Request) -> Response:
        return await self._generate(request, ScoreRequest, self._pooled.score, SCORES)

    async def rerank(self, request: Request) -> Response:
        """Sorts documents by their scores, in the forms of Jina and of Cohere."""
        has_documents = request.url.path != _COHERE_RERANK
        make = partial(self._pooled.rerank, has_documents=has_documents)
        return await self._generate(request, RerankRequest, make, RERANKS)

    async def tokenize(self, request: Request) -> Response:
        return await self._tokens(request, TokenizeRequest, self._generations.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._tokens(request, DetokenizeRequest, self._generations.detokenize)

    async def version(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"version": version()})

    async def openapi(self, _request: Request) -> Response:
        return JSONResponse(self._document)

    async def models(self, request: Request) -> Response:
        self._counted(request)
        return self._listed(request)

    def _listed(self, request: Request) -> Response:
        data = [self._model(served) for served in self._models]
        data += [self._alias(name) for name in sorted(self._models.aliases)]
        listed: dict[str, Any] = {"object": "list", "data": data}
        if ANTHROPIC_VERSION in request.headers:
            data = listed["data"] = list(map(_of_anthropic, data))
            listed |= {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return JSONResponse(listed)

    async def model(self, request: Request) -> Response:
        self._counted(request)
        name = request.path_params["name"]
        if not name:  # of /v1/models/
            return self._listed(request)
        served = self._models.of(name)
        is_alias = name in self._models.aliases
        found = self._alias(name) if is_alias else self._model(served)
        return JSONResponse(_of_anthropic(found) if ANTHROPIC_VERSION in request.headers else found)

    async def health(self, _request: Request) -> Response:
        """Reports readiness, as gRPC's health check named `readiness`."""
        if self._requests.is_draining:
            raise UnavailableError("the router is draining; another one will serve")
        if reason := self._readiness.reason:
            raise UnavailableError(reason)
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Serves the metrics of `--metrics-port` to callers that may use this API."""
        self._caller(request)
        assert self._render_metrics is not None, "a route that is not there"
        body, content_type = self._render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def page(self, request: Request) -> Response:
        return page_response(request)

    async def _tokens(
        self, request: Request, schema: type[_Body], make: "_Make[_Body, Struct]"
    ) -> Response:
        answer, headers = await self._compute(request, schema, make, CHAT_COMPLETIONS)
        return Response(msgspec.json.encode(answer), headers=headers, media_type=JSON)

    async def _generate(
        self,
        request: Request,
        schema: type[_Body],
        make: "_Make[_Body, HttpCall | PooledHttpCall]",
        names: FieldNames,
    ) -> Response:
        return _Answer(self._request(request, schema, make, names), self._limit_headers)

    @asynccontextmanager
    async def _request(
        self, request: Request, schema: type[_Body], make: "_Make[_Body, _Made]", names: FieldNames
    ) -> "AsyncIterator[_Parsed[_Made]]":
        """Yields as `_parsed`. A call that fails in the block is metered as a request."""
        with self._models.failing():
            async with self._parsed(request, schema, make, names) as parsed:
                yield parsed

    @asynccontextmanager
    async def _parsed(
        self, request: Request, schema: type[_Body], make: "_Make[_Body, _Made]", names: FieldNames
    ) -> "AsyncIterator[_Parsed[_Made]]":
        """Yields what `make` makes of the body, the function that names the body's fields in later
        errors, and the tenant. A large body has its share of the budget within the block, and an
        error in it counts as a request."""
        # Unknown callers and tenants over their limit are rejected before the body is read.
        caller = self._caller(request)
        tenant = self._tenants.of(caller).name
        self._limits.check(tenant)
        self._requests.check_open()
        try:
            count_bytes = partial(self._limits.count_bytes, tenant)
            async with self._bodies.read(request, schema, count_bytes, tenant) as parsed:
                in_terms = partial(names.renamed, parsed)
                with _naming(in_terms):
                    made = await make(parsed, caller)
                yield made, in_terms, tenant
        except BatonError:
            self._limits.count_request(tenant)  # an invalid request has cost work, too
            raise

    async def _compute(
        self, request: Request, schema: type[_Body], make: "_Make[_Body, _Made]", names: FieldNames
    ) -> tuple[_Made, dict[str, str]]:
        """Returns what the router itself computes of the body, and headers of the answer."""
        async with self._parsed(request, schema, make, names) as (made, _, tenant):
            self._limits.count_request(tenant)
            return made, self._limit_headers(tenant)

    def _limit_headers(self, tenant: str) -> dict[str, str]:
        return limit_headers(self._limits.statuses(tenant))

    def _counted(self, request: Request) -> Caller:
        """Returns the caller, whose request counts towards its limits."""
        caller = self._caller(request)
        tenant = self._tenants.of(caller).name
        self._limits.check(tenant)
        self._limits.count_request(tenant)
        return caller

    def _caller(self, request: Request) -> Caller:
        """Returns the caller. Raises `UnauthenticatedError` or `PermissionDeniedError`."""
        caller = HttpCaller(request)
        if self._access is not None:
            self._access.check(caller, INFERENCE)
        self._tenants.of(caller)
        return caller

    def _model(self, served: ServedModel) -> dict[str, Any]:
        card = served.services.card
        return {
            "id": served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "max_model_len": served.inference.max_model_len,
            "has_chat_template": card.chat_template is not None,
            "takes_images": served.services.intake.images.are_taken,
            "has_workers": served.has_workers,
            "pooled_output": None if card.pooling is None else card.pooling.kind,
            "sampling_defaults": card.sampling_defaults.given,
        }

    def _alias(self, name: str) -> dict[str, Any]:
        """Returns the entry of an alias: that of its model with the largest weight, under the
        alias's name."""
        weights = dict(self._models.aliases[name])
        return {**self._model(self._models.of(name)), "id": name, "alias_of": weights}


def _of_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the entry of a model with the fields that Anthropic's clients read, too."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        **model,
        "type": "model",
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


@contextmanager
def _naming(in_terms: InTerms) -> Iterator[None]:
    """Raises errors of fields in the terms of the request's API."""
    try:
        yield
    except InvalidArgumentError as error:
        raise in_terms(error) from error
