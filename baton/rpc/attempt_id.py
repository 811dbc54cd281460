"""Id of one attempt at a request, by which workers know it."""

import re

_ATTEMPT = re.compile(r"(?P<request>.*)\.[0-9a-f]{12}", re.DOTALL)


def attempt_id(request_id: str, lease_id: bytes) -> str:
    """Returns an id that is new with each attempt: an attempt that a worker is still ending never
    collides with the next one of that request, from this router or another."""
    return f"{request_id}.{lease_id.hex()[:12]}"


def request_id_of(attempt: str) -> str:
    """Returns the id that the client knows the request by."""
    match = _ATTEMPT.fullmatch(attempt)
    return attempt if match is None else match["request"]
