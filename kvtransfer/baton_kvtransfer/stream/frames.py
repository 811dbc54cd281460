"""Zero-copy codec for the events of a Fetch: `FetchResponse` messages as bytes.

The payload is most of what a worker sends, and protobuf would copy it three times. So `encode`
writes a `BlockRun` by hand, payload last, and `decode` parses one by hand, with fields in any
order. Both are compatible with protobuf's own encoding of the message.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from baton.v1 import kv_transfer_pb2 as pb
from baton_kvtransfer.stream.block_batch import BlockBatch

_BYTES = 2


def _tag(number: int) -> int:
    return number << 3 | _BYTES


_BLOCKS = _tag(pb.FetchResponse.BLOCKS_FIELD_NUMBER)
_PAYLOAD = _tag(pb.BlockRun.PAYLOAD_FIELD_NUMBER)


def encode(event: pb.FetchResponse | BlockBatch) -> bytes:
    """Returns one event as bytes. Copies each piece of a payload once, into the result."""
    if isinstance(event, pb.FetchResponse):
        return event.SerializeToString()
    head = pb.BlockRun(
        group=event.group,
        first_block=event.first_block,
        checksums=event.checksums,
        source_blocks=event.source_blocks,
    ).SerializeToString()
    if event.payload:
        head += bytes([_PAYLOAD]) + _varint(event.num_bytes)
    length = _varint(len(head) + event.num_bytes)
    return b"".join((bytes([_BLOCKS]), length, head, *event.payload))


def decode(data: bytes) -> pb.FetchResponse | BlockBatch | None:
    """Returns one event, whose payload is a view of `data`; None if `data` is no event."""
    try:
        if data[:1] == bytes([_BLOCKS]):
            start, end = _delimited(data, 1)
            if end == len(data):
                return _run(data, start)
        response = pb.FetchResponse.FromString(data)
        if response.HasField("blocks"):
            return _run(response.blocks.SerializeToString(), 0)
    except (DecodeError, IndexError, ValueError):
        return None
    return response


def _run(data: bytes, start: int) -> BlockBatch:
    """Parses a `BlockRun` from `start` to the end of `data`. The last of several payloads counts,
    as in protobuf."""
    head, payload = bytearray(), memoryview(b"")
    for tag, begin, value, end in _fields(data, start):
        if tag == _PAYLOAD:
            payload = memoryview(data)[value:end]
        else:
            head += data[begin:end]
    fields = pb.BlockRun.FromString(bytes(head))
    return BlockBatch(
        group=fields.group,
        first_block=fields.first_block,
        checksums=tuple(fields.checksums),
        payload=(payload,) if payload else (),
        source_blocks=tuple(fields.source_blocks),
    )


def _fields(data: bytes, position: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (tag, start of field, start of value, end of field), in bytes. Raises `ValueError` or
    `IndexError` if `data` is malformed."""
    while position < len(data):
        begin = position
        tag, value = _read_varint(data, position)
        match tag & 7:
            case 0:
                position = _read_varint(data, value)[1]
            case 1:
                position = value + 8
            case 2:
                value, position = _delimited(data, value)
            case 5:
                position = value + 4
            case _:
                raise ValueError(f"no such wire type as {tag & 7}")
        if position > len(data):
            raise ValueError("a field is cut off")
        yield tag, begin, value, position


def _delimited(data: bytes, position: int) -> tuple[int, int]:
    """Returns the begin and end of a length-delimited value."""
    length, begin = _read_varint(data, position)
    return begin, begin + length


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the value and its end. Raises `IndexError` if it is cut off, or `ValueError`."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number of more than ten bytes")
