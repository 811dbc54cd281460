"""Malformed requests: finds the field that cannot be parsed.

gRPC answers INTERNAL if a deserializer raises. So ours returns a `Malformed` in place of the
request, and the interceptor raises its error. Independent of message types.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.errors import InvalidArgumentError

Deserializer: TypeAlias = Callable[[bytes], Any]

_LENGTH_DELIMITED = 2


@dataclass(frozen=True, slots=True)
class Malformed:
    """Placeholder for a request that could not be parsed."""

    error: InvalidArgumentError


def tolerant(deserialize: Deserializer) -> Deserializer:
    """Wraps `deserialize` to return a `Malformed` for a message that cannot be parsed."""
    descriptor = descriptor_of(deserialize)
    if descriptor is None:
        return deserialize

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Malformed(_explain(data, descriptor))

    return parse


def descriptor_of(deserialize: Deserializer) -> Descriptor | None:
    """Returns the descriptor of the messages that it makes; None if it makes others."""
    message_class = getattr(deserialize, "__self__", None)
    if not (isinstance(message_class, type) and issubclass(message_class, Message)):
        return None
    descriptor: Any = message_class.DESCRIPTOR
    return cast("Descriptor", descriptor)


def _explain(data: bytes, descriptor: Descriptor) -> InvalidArgumentError:
    field = _bad_text(data, descriptor)
    if field is not None:
        return InvalidArgumentError(field, "is not valid UTF-8; text must be")
    return InvalidArgumentError("request", f"cannot be parsed as {descriptor.full_name}")


def _bad_text(data: bytes, descriptor: Descriptor) -> str | None:
    """Returns the path of the first string field, at any depth, that is not UTF-8."""
    seen: dict[int, int] = {}
    for number, content in _length_delimited_fields(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        index = seen[number] = seen.get(number, -1) + 1
        path = field_name(field) + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(content):
            return path
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = _bad_text(content, field.message_type)
            if inner is not None:
                return f"{path}.{inner}"
    return None


def field_name(field: FieldDescriptor) -> str:
    """Returns the name that the router's errors use: the oneof's name precedes its member's."""
    group = field.containing_oneof
    if group is None or group.name.startswith("_"):
        return field.name
    return f"{group.name}.{field.name}"


def _length_delimited_fields(data: bytes) -> list[tuple[int, bytes]]:
    """Returns number and content of each in wire order; none if the bytes cannot be read."""
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return []
    return [(f.field_number, f.data) for f in fields if f.wire_type == _LENGTH_DELIMITED]


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
