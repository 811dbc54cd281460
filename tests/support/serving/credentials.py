"""Calls with credentials."""


class Call:
    """A call with the credentials that a test gives it."""

    def __init__(self, *metadata: tuple[str, str], uris: tuple[bytes, ...] = ()) -> None:
        self._metadata = metadata
        self._uris = uris

    def auth_context(self):
        return {"peer_uri": self._uris, "peer_dns": [b"globex.example"]} if self._uris else {}

    def invocation_metadata(self):
        return self._metadata


def bearing(token: str) -> Call:
    return Call(("user-agent", "x"), ("authorization", f"Bearer {token}"))
