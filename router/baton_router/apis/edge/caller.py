"""Caller of an HTTP request, as `baton.serving.tenant` and tracing read it."""

from collections.abc import Iterable, Mapping
from typing import cast

from starlette.requests import Request

# Key in a connection's state, which all of its requests share.
AUTH_CONTEXT = "auth_context"


class HttpCaller:
    """Caller whose metadata are its headers, such as `authorization` and `traceparent`."""

    def __init__(self, request: Request) -> None:
        self._headers = request.headers
        self._auth_context = request.scope.get("state", {}).get(AUTH_CONTEXT, {})

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Returns the certificate's identity as gRPC has it; empty if none was shown."""
        return cast("Mapping[str, Iterable[bytes]]", self._auth_context)

    def invocation_metadata(self) -> "Iterable[tuple[str, str | bytes]]":
        """Returns the headers with lower-case names, as in gRPC. `x-api-key`, in which Anthropic's
        clients have the token, is a bearer token."""
        headers = self._headers.items()
        key = self._headers.get("x-api-key")
        if key is None or "authorization" in self._headers:
            return headers
        return [*headers, ("authorization", f"Bearer {key}")]
