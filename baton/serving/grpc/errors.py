"""Status of each exception, as `google.rpc.Status`. `baton.rpc.errors` converts it back.

InvalidArgumentError      INVALID_ARGUMENT + BadRequest
ContextLengthError        INVALID_ARGUMENT + BadRequest, ErrorInfo
EngineLimitError          INVALID_ARGUMENT + BadRequest, ErrorInfo
OverloadedError           RESOURCE_EXHAUSTED + RetryInfo
UnavailableError          UNAVAILABLE
FailedPreconditionError   FAILED_PRECONDITION
UnsupportedModelError     FAILED_PRECONDITION + ErrorInfo
UnauthenticatedError      UNAUTHENTICATED
PermissionDeniedError     PERMISSION_DENIED
NotFoundError             NOT_FOUND
LeaseNotOpenedError       NOT_FOUND + ErrorInfo
AlreadyExistsError        ALREADY_EXISTS
DeadlineExceededError     DEADLINE_EXCEEDED, and so is TimeoutError
CancelledError            CANCELLED, and so is asyncio's
DataLossError             DATA_LOSS
NonFiniteError            INTERNAL + ErrorInfo
EngineFailedError         INTERNAL + ErrorInfo
InternalError             INTERNAL
anything else             INTERNAL, without its text
"""

import asyncio
from datetime import timedelta

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from baton import errors
from baton.rpc.errors import DOMAIN, REASONS, context_length_info, error_of

__all__ = ["error_of", "status_of"]

# The message is sent in a header, each byte outside ASCII as three, and again, with its field and
# problem, in the header of the details. gRPC refuses more than 8 KiB of headers.
MAX_MESSAGE_CHARS = 1024
MAX_MESSAGE_HEADER_BYTES = 1536
UNEXPECTED = "internal error; the log of the server that failed says more"

_CODES: dict[type[BaseException], grpc.StatusCode] = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedModelError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.DataLossError: grpc.StatusCode.DATA_LOSS,
    errors.BatonError: grpc.StatusCode.INTERNAL,
    TimeoutError: grpc.StatusCode.DEADLINE_EXCEEDED,
    asyncio.CancelledError: grpc.StatusCode.CANCELLED,
}


_CODE_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def status_of(error: BaseException) -> status_pb2.Status:
    """Returns the status that the caller receives.

    A failed call to another process passes on that process's status. Of an exception group the
    first `BatonError` counts. An unexpected exception gives INTERNAL, without its text.
    """
    error = _cause(error)
    code = next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)
    if code is None:
        return _status(grpc.StatusCode.INTERNAL, UNEXPECTED)
    return _status(code, str(error) or code.value[1], *_details_of(error))


def code_of(error: BaseException) -> str:
    """Returns the name of the code that the caller receives, such as "UNAVAILABLE"."""
    if isinstance(error, GeneratorExit):  # of a handler whose caller has disconnected
        return grpc.StatusCode.CANCELLED.name
    return _CODE_NAMES[status_of(error).code]


def _cause(error: BaseException) -> BaseException:
    """Returns the root cause: unwraps exception groups and failed calls."""
    if isinstance(error, BaseExceptionGroup):
        causes = [_cause(inner) for inner in error.exceptions]
        return next((c for c in causes if isinstance(c, errors.BatonError)), causes[0])
    return error_of(error) if isinstance(error, grpc.RpcError) else error


def _status(code: grpc.StatusCode, message: str, *details: Message) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_shortened(message))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _details_of(error: BaseException) -> list[Message]:
    if isinstance(error, errors.InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field), description=_shortened(error.problem)
        )
        details: list[Message] = [error_details_pb2.BadRequest(field_violations=[violation])]
        if isinstance(error, errors.ContextLengthError):
            details.append(context_length_info(error))
        return [*details, *_reason_of(error)]
    if isinstance(error, errors.OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=error.retry_after))
        return [retry]
    return _reason_of(error)


def _reason_of(error: BaseException) -> list[Message]:
    """Returns the detail with the error's reason; none if its code says all."""
    reason = next((REASONS[kind] for kind in type(error).__mro__ if kind in REASONS), None)
    return [] if reason is None else [error_details_pb2.ErrorInfo(domain=DOMAIN, reason=reason)]


def _shortened(text: str) -> str:
    shortened = text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1]
    while _header_bytes(shortened) > MAX_MESSAGE_HEADER_BYTES:
        shortened = shortened[: len(shortened) * 3 // 4]
    return text if shortened == text else shortened + "…"


def _header_bytes(text: str) -> int:
    """Returns the bytes of a text in a header, where all but printable ASCII is written as %XX."""
    return sum(1 if 0x20 <= byte < 0x7F else 3 for byte in text.encode(errors="replace"))
