"""Host check: rejects requests whose host header has another name than the router's.

A web page whose name resolves to a loopback address (DNS rebinding) can send requests there from a
browser, as one of the router's own origin; its name is in the host header.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.serving.listening import is_loopback

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(setting: str | None, listens_on: str) -> tuple[str, ...]:
    """Returns the names in `setting`, separated by commas; "*": any. If it is None, those of a
    loopback address if the router listens on one, and else any."""
    if setting is None:
        return LOOPBACK_HOSTS if is_loopback(listens_on) else ("*",)
    return tuple(name.strip().lower() for name in setting.split(",") if name.strip())


class AllowedHosts:
    """Middleware that rejects other hosts with 403.

    Args:
        names: without ports. "*": any; "*.example.org": those that end in ".example.org".
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._allows_any = "*" in names
        self._names = frozenset(names)
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._allows_any:
            given = Headers(scope=scope).get("host", "")
            name = _name_of(given)
            if name not in self._names and not (name and name.endswith(self._endings)):
                raise HTTPException(
                    403, f"the host is {given!r}; expected one of --http-allowed-hosts"
                )
        await self._app(scope, receive, send)


def _name_of(host: str) -> str:
    """Returns the name or address in a host header, without port or brackets; "": invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""
