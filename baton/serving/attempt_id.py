"""Id of one attempt at a request, by which workers know it."""

import re

_ATTEMPT = re.compile(r"(?P<request>.*)\.[0-9a-f]{12}", re.DOTALL)


def attempt_id(request_id: str, lease_id: bytes) -> str:
    """New with each attempt, so that one which a worker has not quite ended never meets the next of
    that name, be it this router's or another's."""
    return f"{request_id}.{lease_id.hex()[:12]}"


def request_id_of(attempt: str) -> str:
    """The name that the request has for its client."""
    match = _ATTEMPT.fullmatch(attempt)
    return attempt if match is None else match["request"]
