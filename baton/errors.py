"""The one error hierarchy.

Rooms raise these; `baton.serving.errors` maps them to gRPC codes on the way out and back on the way
in, so that an error keeps its type from process to process. Knows nothing of gRPC itself.
"""


class BatonError(Exception):
    """Base of all errors: a sentence on what failed and what to do about it."""


class InvalidArgumentError(BatonError):
    """The caller's request is malformed; repeating it unchanged cannot help.

    `field` is the path of the offending field, `problem` names its value and the bound.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class OverloadedError(BatonError):
    """There is no room now. Worth repeating after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(BatonError):
    """The other side is draining, gone or not there yet; another one may serve the request."""


class FailedPreconditionError(BatonError):
    """The two sides may not work together as they are."""


class UnauthenticatedError(BatonError):
    """The caller has shown credentials that are not known here."""


class PermissionDeniedError(BatonError):
    """The caller is known, and may not do this."""


class NotFoundError(BatonError):
    """The named thing is not here, or no longer."""


class AlreadyExistsError(BatonError):
    """The named thing is here already and may exist only once."""


class DeadlineExceededError(BatonError):
    """Time ran out."""


class CancelledError(BatonError):
    """Somebody who may do so called it off."""


class DataLossError(BatonError):
    """Bytes arrived damaged."""


class UnsupportedModelError(BatonError):
    """This checkpoint cannot be served; the message says why."""


class InternalError(BatonError):
    """A bug of ours."""
