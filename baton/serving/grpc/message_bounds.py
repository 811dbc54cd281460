"""Bounds of serialized protobuf messages: counts fields without making objects of them.

A parser makes an object of each element, at 30 times the bytes of the smallest ones. Independent of
message types: their descriptors tell which fields are repeated.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.errors import InvalidArgumentError
from baton.serving.grpc.malformed import field_name

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
# Every byte of a varint but its last one.
_CONTINUED = bytes(range(0x80, 0x100))
_MAX_VARINT_BYTES = 10
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class MessageBounds:
    """Bounds of one message, with all messages in it.

    Attributes:
        max_elements: maximum elements by a field's full name, such as "baton.v1.Chat.messages".
        max_elements_within: those that differ, by the full name of the message that is checked.
        max_others: maximum elements of every other field, and of all unknown ones together.
        max_text_bytes: maximum bytes of a text.
        max_bytes_of: that of texts and bytes that differ, by a field's full name.
    """

    max_elements: Mapping[str, int] = field(default_factory=dict)
    max_elements_within: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    max_others: int = 1024
    max_text_bytes: int = 2**20
    max_bytes_of: Mapping[str, int] = field(default_factory=dict)

    def check(self, data: bytes, descriptor: Descriptor) -> None:
        """Raises `InvalidArgumentError` beyond a bound. Bytes that are no message pass up to where
        a parser would fail."""
        own = self.max_elements_within.get(descriptor.full_name, {})
        _Count(self, {**self.max_elements, **own}).add(memoryview(data), descriptor, "", 0)


class _Count:
    def __init__(self, bounds: MessageBounds, max_elements: Mapping[str, int]) -> None:
        self._bounds = bounds
        self._max_elements = max_elements
        self._counts: Counter[str] = Counter()

    def add(self, data: memoryview, descriptor: Descriptor, path: str, depth: int) -> None:
        """Adds the fields of a message at `path`; of one that is cut off, those before the cut."""
        fields = descriptor.fields_by_number
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            kind, number = tag & 7, tag >> 3
            known = fields.get(number)
            begin = at
            if kind == _VARINT:
                _, at = _varint(data, at)
            elif kind == _BYTES:
                size, begin = _varint(data, at)
                at = begin + size
            else:
                at += _WIDTHS.get(kind, 0)  # the ends of a group have no content
            if known is None:
                self._count("", path or "request", 1)
            else:
                self._add_field(known, kind, data[begin:at], path, depth)

    def _add_field(
        self, known: FieldDescriptor, kind: int, content: memoryview, path: str, depth: int
    ) -> None:
        name = _path_of(known, path)
        if kind != _BYTES:
            self._count(known.full_name, name, 1)
        elif known.message_type is not None:
            self._count(known.full_name, name, 1)
            if depth < _MAX_DEPTH:
                inner = f"{name}[]" if known.is_repeated else name
                self.add(content, known.message_type, inner, depth + 1)
        elif known.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._count(known.full_name, name, 1)
            most = self._bounds.max_bytes_of.get(known.full_name, self._bounds.max_text_bytes)
            _check_bytes(name, len(content), most)
        else:  # packed numbers
            self._count(known.full_name, name, _num_packed(known, content))

    def _count(self, full_name: str, name: str, num: int) -> None:
        self._counts[full_name] += num
        most = self._max_elements.get(full_name, self._bounds.max_others)
        if self._counts[full_name] > most:
            raise InvalidArgumentError(
                name.rstrip("[]"), f"has too many elements; expected at most {most}"
            )


def _check_bytes(name: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidArgumentError(
            name.rstrip("[]"), f"has {num_bytes} bytes; at most {most} are taken"
        )


def _path_of(known: FieldDescriptor, path: str) -> str:
    """Returns the path of a field in the message at `path`: that of the message, if it is a list of
    ids or one of several, which have no index here."""
    if not path:
        return field_name(known)
    return path if known.name == "ids" or path.endswith("[]") else f"{path}.{field_name(known)}"


def _num_packed(known: FieldDescriptor, content: memoryview) -> int:
    widths = {FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8}
    widths |= {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4}
    if known.type in widths:
        return len(content) // widths[known.type]
    return len(bytes(content).translate(None, _CONTINUED))


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Returns the number at `at` and where it ends."""
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at == len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            break
    return value, at
