"""Counter of the elements of serialized protobuf messages, which makes no objects of them.

Independent of message types: their descriptors tell which fields are repeated. Names in bounds are
full names of fields, such as "baton.v1.Chat.messages", and of messages.
"""

from collections import Counter

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.serving.bounds import Bounds
from baton.serving.grpc.malformed import field_name

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
# Every byte of a varint but its last one.
_CONTINUED = bytes(range(0x80, 0x100))
_MAX_VARINT_BYTES = 10


def check_message(data: bytes, descriptor: Descriptor, bounds: Bounds) -> None:
    """Raises `BoundsError` for a message beyond a bound, with all messages in it; all unknown
    fields are one. Bytes that are no message pass up to where a parser would fail."""
    own = bounds.of_kind.get(descriptor.full_name, bounds)
    _Count(own).add(memoryview(data), descriptor, "", 0)


class _Count:
    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
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
            self._bounds.check_depth(depth + 1, name)
            inner = f"{name}[]" if known.is_repeated else name
            self.add(content, known.message_type, inner, depth + 1)
        elif known.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            self._count(known.full_name, name, 1)
            self._bounds.check_bytes(len(content), known.full_name, name.rstrip("[]"))
        else:  # packed numbers
            self._count(known.full_name, name, _num_packed(known, content))

    def _count(self, full_name: str, name: str, num: int) -> None:
        self._counts[full_name] += num
        self._bounds.check_elements(self._counts[full_name], full_name, name.rstrip("[]"))


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
