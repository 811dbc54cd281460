"""Errors of Anthropic's Messages API."""

from baton_router.apis.answers.answer_writer import Json
from baton_router.apis.edge.errors import Failure

PATH = "/v1/messages"

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


def error_body(failure: Failure) -> Json:
    """Returns the body of an error."""
    kind = _KINDS.get(failure.status)
    if kind is None:
        kind = "api_error" if failure.status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": kind, "message": failure.message}}
