"""Error mapping of the HTTP API: exception to status and body in OpenAI's format.

InvalidArgumentError      400 invalid_request_error, with the field as `param`
ContextLengthError        400 context_length_exceeded
PreviousResponseError     400 previous_response_not_found
ModelOutputError          400 unsupported_output, with `model` as `param`
NoImagesError             400 unsupported_input, with `model` as `param`
UnauthenticatedError      401 invalid_api_key
NotFoundError             404
    of a model            404 model_not_found, with `model` as `param`
AlreadyExistsError        409
BodyTimeoutError          408
BodyTooLargeError         413
MediaTypeError            415
OverloadedError           429 rate_limit_exceeded, Retry-After
    of a tenant's limit   and x-ratelimit-*
CancelledError            499 (aborted by an administrator)
UnavailableError          503, Retry-After
FailedPreconditionError   503
DeadlineExceededError     504, and so is TimeoutError
anything else             500, without its text
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from baton import errors
from baton.serving.grpc.errors import UNEXPECTED
from baton_router.routing.admission.rate_limit import Kind, RateLimitedError, RateLimitStatus
from baton_router.served.served_models import ModelNotFoundError
from baton_router.text.images.image_source import NoImagesError
from baton_router.text.model_card import ModelOutputError


class BodyTooLargeError(errors.BatonError):
    """Request body larger than the limit."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"the body is larger than {max_bytes} bytes")


class BodyOverloadError(errors.OverloadedError):
    """Request body for which large requests leave no room. Its client may still be sending it."""


class BodyTimeoutError(errors.BatonError):
    """Request body that did not arrive in time."""


class MediaTypeError(errors.BatonError):
    """Request body that is not declared as JSON, or is compressed."""


class PreviousResponseError(errors.InvalidArgumentError):
    """Unknown `previous_response_id`. Clients that know the code send the conversation again."""

    def __init__(self, problem: str) -> None:
        super().__init__("previous_response_id", problem)


class ErrorDetail(TypedDict):
    """Error in OpenAI's format. `param`: path of the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Body of an error response."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Failure:
    """Error response to a client.

    Attributes:
        kind: the `type` of OpenAI's error.
        is_bug: it is a bug, to be logged.
        too_long: the error of a request longer than the model; None: it is another one.
    """

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    is_bug: bool = False
    too_long: errors.ContextLengthError | None = None

    @property
    def body(self) -> ErrorBody:
        error = ErrorDetail(message=self.message, type=self.kind, param=self.param, code=self.code)
        return ErrorBody(error=error)


_INVALID = "invalid_request_error"
_SERVER = "server_error"

# Status, type and code by exception.
_KINDS: dict[type[BaseException], tuple[int, str, str | None]] = {
    errors.InvalidArgumentError: (400, _INVALID, None),
    errors.ContextLengthError: (400, _INVALID, "context_length_exceeded"),
    PreviousResponseError: (400, _INVALID, "previous_response_not_found"),
    ModelOutputError: (400, _INVALID, "unsupported_output"),
    NoImagesError: (400, _INVALID, "unsupported_input"),
    errors.UnauthenticatedError: (401, "authentication_error", "invalid_api_key"),
    errors.PermissionDeniedError: (403, "permission_error", "permission_denied"),
    errors.NotFoundError: (404, _INVALID, "not_found"),
    BodyTimeoutError: (408, _INVALID, "body_timeout"),
    errors.AlreadyExistsError: (409, _INVALID, "already_exists"),
    BodyTooLargeError: (413, _INVALID, "body_too_large"),
    MediaTypeError: (415, _INVALID, "unsupported_media_type"),
    errors.OverloadedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    errors.CancelledError: (499, "cancelled", "aborted"),
    errors.UnavailableError: (503, _SERVER, "unavailable"),
    errors.FailedPreconditionError: (503, _SERVER, "failed_precondition"),
    errors.DeadlineExceededError: (504, _SERVER, "deadline_exceeded"),
    TimeoutError: (504, _SERVER, "deadline_exceeded"),
    errors.NonFiniteError: (500, _SERVER, "non_finite"),
    errors.BatonError: (500, _SERVER, "internal_error"),
}


def failure_of(error: BaseException) -> Failure:
    """Returns the response to an error; for a group, to its first `BatonError`, if any."""
    error = _cause(error)
    kind = next((_KINDS[kind] for kind in type(error).__mro__ if kind in _KINDS), None)
    if kind is None:
        return Failure(500, UNEXPECTED, _SERVER, "internal_error", is_bug=True)
    status, name, code = kind
    param = error.field if isinstance(error, errors.InvalidArgumentError) else None
    if isinstance(error, ModelNotFoundError | ModelOutputError | NoImagesError):
        param = "model"
    if isinstance(error, ModelNotFoundError):
        code = "model_not_found"
    return Failure(
        status,
        str(error),
        name,
        code,
        param,
        _headers_of(error),
        is_bug=code == "internal_error",
        too_long=error if isinstance(error, errors.ContextLengthError) else None,
    )


def limit_headers(statuses: Mapping[Kind, RateLimitStatus]) -> dict[str, str]:
    """Returns a tenant's rate limit status as the headers of OpenAI's API."""
    headers = {}
    for kind, status in statuses.items():
        headers[f"x-ratelimit-limit-{kind}"] = str(status.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(status.remaining)
        headers[f"x-ratelimit-reset-{kind}"] = f"{status.reset_seconds:.3f}s"
    return headers


def _cause(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(inner) for inner in error.exceptions]
    return next((c for c in causes if isinstance(c, errors.BatonError)), causes[0])


def _headers_of(error: BaseException) -> dict[str, str]:
    """Returns the headers for a retry: rate limits and the wait in whole seconds and in
    milliseconds, or the authentication scheme."""
    if isinstance(error, errors.OverloadedError):
        seconds = max(0.0, error.retry_after)
        statuses = error.statuses if isinstance(error, RateLimitedError) else {}
        return {
            "Retry-After": str(max(1, math.ceil(seconds))),
            "retry-after-ms": str(math.ceil(seconds * 1000)),
            **limit_headers(statuses),
        }
    if isinstance(error, errors.UnavailableError):
        return {"Retry-After": "1"}
    if isinstance(error, errors.UnauthenticatedError):
        return {"WWW-Authenticate": "Bearer"}
    return {}
