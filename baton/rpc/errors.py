"""Errors of failed gRPC calls: the `baton.errors` type that the other process raised.

Independent of servers; `baton.serving.grpc.errors` converts in the other direction.
"""

from collections.abc import Iterable
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from baton.errors import (
    AlreadyExistsError,
    BatonError,
    CancelledError,
    ContextLengthError,
    DataLossError,
    DeadlineExceededError,
    EngineFailedError,
    EngineLimitError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LeaseNotOpenedError,
    NonFiniteError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedModelError,
)

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "baton"

REASONS: dict[type[BatonError], str] = {
    EngineFailedError: "ENGINE_FAILED",
    EngineLimitError: "ENGINE_LIMIT",
    LeaseNotOpenedError: "LEASE_NOT_OPENED",
    NonFiniteError: "NON_FINITE",
    UnsupportedModelError: "UNSUPPORTED_MODEL",
}
"""Reasons, in an ErrorInfo, of errors that share their code with others."""
_TYPES_BY_REASON = {reason: kind for kind, reason in REASONS.items()}

_CONTEXT_LENGTH = "CONTEXT_LENGTH"
# Names of a size and its limit, by their unit.
_LENGTHS = {"tokens": ("num_tokens", "max_model_len"), "bytes": ("num_bytes", "max_bytes")}

_Detail = TypeVar("_Detail", bound=Message)

_TYPES: dict[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: FailedPreconditionError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.INTERNAL: InternalError,
}


# Details by `grpc.aio` of a call that this process has cancelled: a reader may get an error of it.
_CANCELLED_HERE = "Locally cancelled by application!"

_LOSSES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)


# gRPC's message for a method of a service that is not registered.
_UNKNOWN_METHOD = "Method not found!"
_ANOTHER_PORT = (
    "this is not offered at this port; a process serves its clients at --port and those who look "
    "after it at --admin-port, which are 50051 and 50053 on a router unless it was told otherwise"
)

# gRPC's messages when the peer's system has closed the sockets of a process that ended.
_ENDS = ("socket closed", "connection reset", "broken pipe")


# gRPC's messages for failed TLS connections, and their meaning. The first match counts.
_TLS_HINTS = (
    ("wrong_version_number", "the other side speaks no TLS, or no gRPC"),
    ("certificate has expired", "the other side's certificate has expired"),
    ("certificate is not yet valid", "the other side's certificate is not valid yet"),
    ("certificate_verify_failed", "no trusted authority has signed the other side's certificate"),
    ("hostname verification", "the other side's certificate is for another name than it was "
     "asked for by"),
    ("socket closed", "the other side hangs up at once, as one does that wants TLS, a certificate, "
     "or another one than was shown"),
)  # fmt: skip


def error_of(rpc_error: grpc.RpcError) -> BatonError:
    """Returns the error of a failed call, with the type and details that the other side gave it.

    Takes the errors of both `grpc` and `grpc.aio`. Codes that Baton never sends become
    `InternalError`, except `UNIMPLEMENTED`, which is a `FailedPreconditionError`: the other side
    does not offer the call.
    """
    code = rpc_error.code()
    message = _explained(rpc_error.details() or code.name)
    status = _rich_status(rpc_error)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid_argument(message, status)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _resource_exhausted(message, status)
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is not None and info.domain == DOMAIN and info.reason in _TYPES_BY_REASON:
        return _TYPES_BY_REASON[info.reason](message)
    if code is grpc.StatusCode.UNIMPLEMENTED and message == _UNKNOWN_METHOD:
        return FailedPreconditionError(_ANOTHER_PORT)
    if code in _TYPES:
        return _TYPES[code](message)
    return InternalError(f"{code.name}: {message}")


def _explained(message: str) -> str:
    """Returns the message, preceded by its meaning if a TLS connection could not be made."""
    said = message.lower()
    if "failed to connect" not in said:
        return message
    hint = next((hint for words, hint in _TLS_HINTS if words in said), None)
    return message if hint is None else f"{hint} ({message})"


def is_from_server(rpc_error: grpc.RpcError) -> bool:
    """Returns whether a Baton server sent it, not gRPC on this side of a broken connection."""
    return any(key == DETAILS_KEY for key, _ in _metadata(rpc_error))


def is_cancelled_here(rpc_error: grpc.RpcError) -> bool:
    """Returns whether this process has cancelled the call, which tells nothing of the peer."""
    return rpc_error.details() == _CANCELLED_HERE


def is_loss(rpc_error: grpc.RpcError) -> bool:
    """Returns whether the peer died, fell silent, or its connection broke: gRPC itself raised the
    error, not a server."""
    is_of_grpc = not (is_from_server(rpc_error) or is_cancelled_here(rpc_error))
    return is_of_grpc and rpc_error.code() in _LOSSES


def has_ended(rpc_error: grpc.RpcError) -> bool:
    """Returns whether a loss is that of a process that has exited. One that is stopped or
    unreachable is lost as well, but may be healthy."""
    details = (rpc_error.details() or "").lower()
    return is_loss(rpc_error) and any(words in details for words in _ENDS)


def _metadata(rpc_error: grpc.RpcError) -> "Iterable[tuple[str, str | bytes]]":
    # An `AioRpcError` may have none, and its entries are plain pairs.
    metadata = cast("Iterable[tuple[str, str | bytes]] | None", rpc_error.trailing_metadata())
    return metadata or ()


def _rich_status(rpc_error: grpc.RpcError) -> status_pb2.Status:
    """Returns the status with its details; an empty one if it is missing or unreadable."""
    for key, value in _metadata(rpc_error):
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()


def _detail(status: status_pb2.Status, kind: type[_Detail]) -> _Detail | None:
    """Returns the first detail of `kind`; None if there is none."""
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            return detail
    return None


def _invalid_argument(message: str, status: status_pb2.Status) -> InvalidArgumentError:
    bad_request = _detail(status, error_details_pb2.BadRequest)
    if bad_request is None or not bad_request.field_violations:
        return InvalidArgumentError("request", message)
    violation = bad_request.field_violations[0]
    error = InvalidArgumentError(violation.field, violation.description)
    info = _detail(status, error_details_pb2.ErrorInfo)
    if info is None or info.domain != DOMAIN:
        return error
    if info.reason == REASONS[EngineLimitError]:
        return EngineLimitError(error.field, error.problem)
    if info.reason != _CONTEXT_LENGTH:
        return error
    for unit, (size, limit) in _LENGTHS.items():
        try:
            lengths = int(info.metadata[size]), int(info.metadata[limit])
        except ValueError:  # also of a name that is not there
            continue
        return ContextLengthError(
            error.field, error.problem, *lengths, unit, info.metadata["remedy"]
        )
    return error


def context_length_info(error: ContextLengthError) -> error_details_pb2.ErrorInfo:
    """Returns the detail by which the caller knows the error from others of a field."""
    size, limit = _LENGTHS[error.unit]
    lengths = {size: str(error.size), limit: str(error.limit)}
    if error.remedy:
        lengths["remedy"] = error.remedy
    return error_details_pb2.ErrorInfo(domain=DOMAIN, reason=_CONTEXT_LENGTH, metadata=lengths)


def _resource_exhausted(message: str, status: status_pb2.Status) -> BatonError:
    """Returns an overload, unless gRPC itself refused a message that will never fit."""
    retry = _detail(status, error_details_pb2.RetryInfo)
    if retry is not None:
        return OverloadedError(message, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    if "larger than max" in message:
        return InvalidArgumentError("request", message)
    return OverloadedError(message)
