"""Endpoints of the HTTP API: their routes, their OpenAPI document, and errors that list them."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.version import version
from baton_router.apis.edge.errors import ErrorBody

_SHOWN_CHARS = 100
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_NO_WORD = re.compile(r"\W+")

JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Endpoint of the HTTP API.

    Attributes:
        path: in Starlette's notation.
        summary: one line for the OpenAPI document.
        body: schema of the request's body; None: it has none.
        answer: schema of the answer, if it is JSON and has one.
        media_types: of the answer.
        error: schema of its errors.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    body: Any = None
    answer: Any = None
    media_types: Sequence[str] = (JSON,)
    error: Any = ErrorBody

    @property
    def route(self) -> Route:
        return Route(self.path, self.handler, methods=[self.method])

    @property
    def url(self) -> str:
        """Returns the path as the OpenAPI document has it: parameters without their kind."""
        return _PARAMETER.sub(r"{\1}", self.path)


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 document, whose schemas are those by which bodies are parsed."""
    kinds = [k for e in endpoints for k in (e.body, e.answer, e.error) if k is not None]
    refs, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    of_kind = dict(zip(kinds, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, of_kind)
        paths.setdefault(endpoint.url, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def refusing(endpoints: Sequence[Endpoint]) -> Callable[[Request, Exception], NoReturn]:
    """Returns the handler of Starlette's own errors, which raises them again, for `Failures`: for
    an unknown route or method with what exists instead."""

    def refuse(request: Request, error: Exception) -> NoReturn:
        path = request.url.path[:_SHOWN_CHARS]
        match error:
            case HTTPException(status_code=405) if _is_named(request.url.path, endpoints):
                methods = ", ".join(_methods_of(request.url.path, endpoints))
                problem = f"{request.method} is not served at {path}; use {methods}"
                raise HTTPException(405, problem, {"Allow": methods})
            case HTTPException(status_code=404 | 405):
                listed = ", ".join(f"{e.method} {e.url}" for e in endpoints)
                raise HTTPException(404, f"no route {path}; this server has {listed}")
        raise error

    return refuse


def _is_named(path: str, endpoints: Iterable[Endpoint]) -> bool:
    """Returns whether there is a route of just this path; one with a parameter takes any word, such
    as that of a route which is not here."""
    return any(e.path == path for e in endpoints)


def _methods_of(path: str, endpoints: Iterable[Endpoint]) -> list[str]:
    return [e.method for e in endpoints if e.route.path_regex.match(path)]


def _operation(endpoint: Endpoint, of_kind: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {media_type: {} for media_type in endpoint.media_types}
    if endpoint.answer is not None:
        content[JSON] = {"schema": of_kind[endpoint.answer]}
    error = {"description": "Error", "content": {JSON: {"schema": of_kind[endpoint.error]}}}
    operation: dict[str, Any] = {
        "operationId": _NO_WORD.sub("_", endpoint.method.lower() + endpoint.url).strip("_"),
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": error,
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        body = {"required": True, "content": {JSON: {"schema": of_kind[endpoint.body]}}}
        operation["requestBody"] = body
    return operation
