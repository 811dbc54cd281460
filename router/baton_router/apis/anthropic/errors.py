"""Errors of Anthropic's Messages API."""

from starlette.types import Scope

from baton.errors import ContextLengthError
from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.edge.errors import Failure
from baton_router.apis.edge.middleware import ErrorFormat

PATH = "/v1/messages"
VERSION = "anthropic-version"
"""Header that Anthropic's clients send with every request."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_format(scope: Scope) -> ErrorFormat | None:
    """Returns the format of errors where the client is Anthropic's, by the path or its header."""
    names = {name for name, _ in scope["headers"]}
    is_own = scope["path"].startswith(PATH) or VERSION.encode() in names
    return error_body if is_own else None


def error_body(failure: Failure) -> Json:
    """Returns the body of an error."""
    kind = _KINDS.get(failure.status)
    if kind is None:
        kind = "api_error" if failure.status >= 500 else "invalid_request_error"
    message = failure.message if failure.too_long is None else _too_long(failure.too_long)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _too_long(error: ContextLengthError) -> str:
    """Returns the message by which clients know that they must shorten the conversation."""
    # The longest prompt leaves room for one token.
    most = min(error.limit, error.size - 1)
    told = f"prompt is too long: {error.size} {error.unit} > {most} maximum"
    return f"{told}. {error.remedy}" if error.remedy else told
