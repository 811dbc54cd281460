import asyncio

import grpc
import pytest
from grpc_status import rpc_status

from baton import errors
from baton.rpc.errors import error_of, is_cancelled_here, is_loss
from baton.serving.grpc.errors import MAX_MESSAGE_CHARS, UNEXPECTED, status_of

ROUND_TRIPS = [
    (errors.InvalidArgumentError("sampling.top_p", "is 2; must be in (0, 1]"), "INVALID_ARGUMENT"),
    (errors.ContextLengthError("input.text", "has 9 tokens", 9, 8), "INVALID_ARGUMENT"),
    (errors.ContextLengthError("input.text", "has 9 bytes", 9, 8, "bytes"), "INVALID_ARGUMENT"),
    (
        errors.ContextLengthError("input.text", "is 9. Enlarge it.", 9, 8, remedy="Enlarge it."),
        "INVALID_ARGUMENT",
    ),
    (errors.EngineLimitError("sampling.n", "is 9; this engine runs 8"), "INVALID_ARGUMENT"),
    (errors.OverloadedError("the queue is full", retry_after=2.5), "RESOURCE_EXHAUSTED"),
    (errors.UnavailableError("draining"), "UNAVAILABLE"),
    (errors.FailedPreconditionError("layouts differ"), "FAILED_PRECONDITION"),
    (errors.UnsupportedModelError("bloom never calls attention"), "FAILED_PRECONDITION"),
    (errors.UnauthenticatedError("no such token"), "UNAUTHENTICATED"),
    (errors.PermissionDeniedError("not yours"), "PERMISSION_DENIED"),
    (errors.NotFoundError("lease gone"), "NOT_FOUND"),
    (errors.LeaseNotOpenedError("nothing came"), "NOT_FOUND"),
    (errors.NonFiniteError("request r has NaN logits"), "INTERNAL"),
    (errors.AlreadyExistsError("lease is here"), "ALREADY_EXISTS"),
    (errors.DeadlineExceededError("too late"), "DEADLINE_EXCEEDED"),
    (errors.CancelledError("aborted"), "CANCELLED"),
    (errors.DataLossError("checksum differs"), "DATA_LOSS"),
    (errors.InternalError("a bug"), "INTERNAL"),
    (errors.EngineFailedError("the engine failed"), "INTERNAL"),
]


def received(error: BaseException) -> grpc.aio.AioRpcError:
    """The error as the caller's gRPC raises it."""
    status = rpc_status.to_status(status_of(error))
    metadata = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details)


def foreign(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def test_every_error_class_has_round_trip_case():
    ours = {e for e in vars(errors).values() if isinstance(e, type)} - {errors.BatonError}
    assert {type(error) for error, _ in ROUND_TRIPS} == ours


@pytest.mark.parametrize(("error", "code"), ROUND_TRIPS, ids=lambda x: type(x).__name__)
def test_error_round_trips_through_status(error, code):
    rpc_error = received(error)
    back = error_of(rpc_error)
    assert rpc_error.code().name == code
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_error_subclass_round_trips_as_its_base():
    class NoBlocksError(errors.OverloadedError):
        pass

    assert type(error_of(received(NoBlocksError("full", 3.0)))) is errors.OverloadedError


def test_unexpected_exception_status_leaks_nothing():
    status = status_of(KeyError("secret"))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    assert status.message == UNEXPECTED


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TimeoutError(), grpc.StatusCode.DEADLINE_EXCEEDED),
        (asyncio.CancelledError(), grpc.StatusCode.CANCELLED),
    ],
)
def test_asyncio_errors_have_own_status_codes(error, code):
    status = status_of(error)
    assert status.code == code.value[0]
    assert status.message


def test_status_of_failed_call_passes_through():
    status = status_of(received(errors.OverloadedError("no room", 4.0)))
    assert status == status_of(errors.OverloadedError("no room", 4.0))


def test_status_of_group_is_its_first_baton_error():
    group = ExceptionGroup("", [ValueError("x"), ExceptionGroup("", [errors.NotFoundError("y")])])
    assert status_of(group) == status_of(errors.NotFoundError("y"))


def test_status_message_is_shortened_to_fit_header():
    status = status_of(errors.InvalidArgumentError("prompt", "x" * 100_000))
    assert len(status.message) == MAX_MESSAGE_CHARS
    assert status.ByteSize() < 4 * MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", errors.UnavailableError),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", errors.InvalidArgumentError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "slow down", errors.OverloadedError),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "Received message larger than max (9 vs. 4)",
            errors.InvalidArgumentError,
        ),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", errors.FailedPreconditionError),
        (grpc.StatusCode.UNKNOWN, "what", errors.InternalError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", errors.DeadlineExceededError),
    ],
)
def test_status_without_details_maps_to_error_type(code, details, kind):
    error = error_of(foreign(code, details))
    assert type(error) is kind
    assert details in str(error)
    assert str(error)


def test_unreadable_status_details_are_ignored():
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    rpc_error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), metadata, "gone"
    )
    assert str(error_of(rpc_error)) == "gone"


def test_call_cancelled_here_tells_nothing_of_the_peer():
    none, details = grpc.aio.Metadata(), grpc.aio._call._LOCAL_CANCELLATION_DETAILS
    error = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, none, none, details)
    assert is_cancelled_here(error)
    assert not is_loss(error)
    assert is_loss(grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, none, none, "closed"))
