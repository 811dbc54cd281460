"""Caller of an HTTP request, as `baton.serving.tenant` and tracing read it."""

from collections.abc import Iterable, Mapping
from typing import cast

from starlette.requests import Request

# Where in a connection's state it is, among what belongs to all of its requests.
AUTH_CONTEXT = "auth_context"


class HttpCaller:
    """Its metadata are its headers: `authorization` among them, and `traceparent`."""

    def __init__(self, request: Request) -> None:
        self._headers = request.headers
        self._auth_context = request.scope.get("state", {}).get(AUTH_CONTEXT, {})

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What the certificate says, if one was shown, as gRPC has it."""
        return cast("Mapping[str, Iterable[bytes]]", self._auth_context)

    def invocation_metadata(self) -> "Iterable[tuple[str, str | bytes]]":
        """Names in lower case, as gRPC has them."""
        return self._headers.items()
