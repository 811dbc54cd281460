"""Error hierarchy of all packages.

`baton.serving.grpc.errors` maps these to gRPC status codes and `baton.rpc.errors` maps them back,
so that an error keeps its type from process to process. Independent of gRPC.
"""


class BatonError(Exception):
    """Base of all errors: a sentence on what failed and what to do about it."""


class InvalidArgumentError(BatonError):
    """Malformed request; repeating it unchanged cannot help.

    `field` is the path of the offending field, `problem` names its value and the bound.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def named(self, field: str, problem: str) -> "InvalidArgumentError":
        """Returns the error in the terms of another API."""
        return InvalidArgumentError(field, problem)


class ContextLengthError(InvalidArgumentError):
    """Request longer than the model, or a text too long to be tokenized.

    `size` and `limit` are in `unit`. "tokens": those of the prompt, or with `max_tokens` where
    these are too many; the limit is that of prompt and output together. "bytes": those of the
    text at least; the limit is that of a prompt's text. `remedy`, a sentence of `problem`, says how
    those who run the workers raise the limit; empty: it is the model's.
    """

    def __init__(
        self,
        field: str,
        problem: str,
        size: int,
        limit: int,
        unit: str = "tokens",
        remedy: str = "",
    ) -> None:
        super().__init__(field, problem)
        self.size = size
        self.limit = limit
        self.unit = unit
        self.remedy = remedy

    def named(self, field: str, problem: str) -> "ContextLengthError":
        return ContextLengthError(field, problem, self.size, self.limit, self.unit, self.remedy)


class EngineLimitError(InvalidArgumentError):
    """Request beyond a limit of one engine, such as its KV pool; a larger one may serve it."""

    def named(self, field: str, problem: str) -> "EngineLimitError":
        return EngineLimitError(field, problem)


class OverloadedError(BatonError):
    """Overload: no capacity now. Worth retrying after `retry_after` seconds.

    Attributes:
        reason: a word for the exhausted limit, of a small set: the label of a metric.
    """

    def __init__(self, message: str, retry_after: float = 1.0, *, reason: str = "overload") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class UnavailableError(BatonError):
    """Peer that is draining, gone or not started yet; another one may serve the request."""


class FailedPreconditionError(BatonError):
    """Incompatible state: the two sides cannot work together as they are."""


class UnauthenticatedError(BatonError):
    """Missing or unknown credentials of the caller."""


class PermissionDeniedError(BatonError):
    """Missing permission: the caller is known, and may not do this."""


class NotFoundError(BatonError):
    """Missing object: the named one is not here, or no longer."""


class LeaseNotOpenedError(NotFoundError):
    """Lease that has not opened in time: the call that opens it has not reached the source."""


class AlreadyExistsError(BatonError):
    """Duplicate object: the named one is here already and may exist only once."""


class DeadlineExceededError(BatonError):
    """Expired deadline."""


class CancelledError(BatonError):
    """Cancellation by a caller that may cancel."""


class DataLossError(BatonError):
    """Data corruption: bytes arrived damaged."""


class UnsupportedModelError(BatonError):
    """Checkpoint that cannot be served; the message gives the reason."""


class NonFiniteError(BatonError):
    """Results of the model that are NaN or infinite, for one request. Another worker of the model
    would most likely compute the same."""


class InternalError(BatonError):
    """Bug in Baton."""


class EngineFailedError(InternalError):
    """Engine that has ended, and all requests in it. Logged once, where it ended."""
