"""Who calls, as `baton.serving.tenant` and traces ask for it, whichever front a call came in by."""

from collections.abc import Iterable

from starlette.datastructures import Headers


class HttpCaller:
    """Its metadata are its headers: `authorization` among them, and `traceparent`."""

    def __init__(self, headers: Headers) -> None:
        self._headers = headers

    def peer_identities(self) -> Iterable[bytes] | None:
        """None: certificates are not asked for here."""
        return None

    def invocation_metadata(self) -> "Iterable[tuple[str, str | bytes]]":
        """Names in lower case, as gRPC has them."""
        return self._headers.items()
