"""Cross-origin requests (CORS): web pages of the allowed origins may read answers."""

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from baton_router.apis.edge.headers import CLAMPED, IGNORED
from baton_router.apis.edge.middleware import ID_HEADERS
from baton_router.routing.admission.rate_limit import KINDS

_EXPOSED = (
    CLAMPED,
    IGNORED,
    *ID_HEADERS,
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in KINDS),
)
# Seconds for which a browser keeps the answer to a preflight.
_MAX_AGE = 600


def cors(origins: str | None) -> list[Middleware]:
    """Returns the middleware for `origins`, separated by commas; "*": any, without credentials of
    the browser. None: there is none."""
    if origins is None:
        return []
    allowed = [origin.strip() for origin in origins.split(",")]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_credentials="*" not in allowed,
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE,
        )
    ]
