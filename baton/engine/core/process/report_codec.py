"""Reports as bytes: the number of the report's type, then a step's record (`step_codec`) or the
fields in MessagePack."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from baton.engine.core.process.error_codec import ErrorData, data_of, error_of
from baton.engine.core.process.step_codec import decode_step, encode_step
from baton.engine.core.reports import (
    Answered,
    Begun,
    Failed,
    QueryFailed,
    Refused,
    Report,
    Stepped,
)


@dataclass(frozen=True, slots=True)
class _Refused:
    request_id: str
    error: ErrorData


@dataclass(frozen=True, slots=True)
class _QueryFailed:
    query: int
    error: ErrorData


_STEPPED: Final = b"\0"
_TYPES: Final[tuple[type[Any], ...]] = (Stepped, Begun, Answered, Failed, _Refused, _QueryFailed)
_NUMBERS: Final = {each: bytes([i]) for i, each in enumerate(_TYPES)}
_DECODERS: Final = [msgspec.msgpack.Decoder(each) for each in _TYPES[1:]]
_encode: Final = msgspec.msgpack.Encoder().encode


def encode_report(report: Report) -> bytes:
    """Returns a report as bytes."""
    match report:
        case Stepped(output):
            return _STEPPED + encode_step(output)
        case Refused(request_id, error):
            return _encoded(_Refused(request_id, data_of(error)))
        case QueryFailed(query, error):
            return _encoded(_QueryFailed(query, data_of(error)))
        case _:
            return _encoded(report)


def decode_report(record: bytes) -> Report:
    """Returns the report that `encode_report` was given."""
    kind, fields = record[0], memoryview(record)[1:]
    if not kind:
        return Stepped(decode_step(fields))
    report = _DECODERS[kind - 1].decode(fields)
    match report:
        case _Refused(request_id, data):
            return Refused(request_id, error_of(data))
        case _QueryFailed(query, data):
            return QueryFailed(query, error_of(data))
        case _:
            decoded: Report = report
            return decoded


def _encoded(report: object) -> bytes:
    return _NUMBERS[type(report)] + _encode(report)
