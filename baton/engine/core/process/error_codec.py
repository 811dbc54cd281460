"""Errors as plain data, so that an error keeps its type and its fields from process to process."""

from dataclasses import dataclass

from baton import errors
from baton.errors import (
    BatonError,
    ContextLengthError,
    InvalidArgumentError,
    OverloadedError,
)


@dataclass(frozen=True, slots=True)
class ErrorData:
    """Error as data. `field` and `problem` are of an `InvalidArgumentError`, the last four are of
    a `ContextLengthError`; `retry_after` is of an `OverloadedError`."""

    kind: str
    message: str
    field: str = ""
    problem: str = ""
    retry_after: float = 0.0
    size: int = 0
    limit: int = 0
    unit: str = ""
    remedy: str = ""


def data_of(error: BatonError) -> ErrorData:
    """Returns an error as data."""
    kind = type(error).__name__
    match error:
        case ContextLengthError():
            lengths = error.size, error.limit, error.unit, error.remedy
            return ErrorData(kind, "", error.field, error.problem, 0.0, *lengths)
        case InvalidArgumentError():
            return ErrorData(kind, "", error.field, error.problem)
        case OverloadedError():
            return ErrorData(kind, str(error), retry_after=error.retry_after)
        case _:
            return ErrorData(kind, str(error))


def error_of(data: ErrorData) -> BatonError:
    """Returns the error that `data_of` was given."""
    kind: type[BatonError] = getattr(errors, data.kind)
    if issubclass(kind, ContextLengthError):
        return kind(data.field, data.problem, data.size, data.limit, data.unit, data.remedy)
    if issubclass(kind, InvalidArgumentError):
        return kind(data.field, data.problem)
    if kind is OverloadedError:
        return OverloadedError(data.message, data.retry_after)
    return kind(data.message)
