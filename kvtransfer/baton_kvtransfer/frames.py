"""The events of a Fetch as bytes: `FetchResponse` messages, whose payload is not copied on the way.

A payload is most of what a worker sends, and a message of protobuf would copy it three times. So
the bytes of a `BlockRun` are put together by hand, payload last, and taken apart by hand, in
whatever order the fields are. Anybody who reads or writes the message as it is defined
understands the other.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from baton.v1 import kv_transfer_pb2 as pb
from baton_kvtransfer.block_batch import BlockBatch

_BYTES = 2


def _tag(number: int, wire_type: int = _BYTES) -> int:
    return number << 3 | wire_type


_BLOCKS = _tag(pb.FetchResponse.BLOCKS_FIELD_NUMBER)
_PAYLOAD = _tag(pb.BlockRun.PAYLOAD_FIELD_NUMBER)


def encode(event: pb.FetchResponse | BlockBatch) -> bytes:
    """One event. The pieces of a payload are read once, into the result."""
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
    """One event; a run's payload is a view of `data`. None for what is no event."""
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
    """From the bytes of a `BlockRun`, to the end of `data`. Of several payloads the last counts, as
    protobuf has it."""
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
    """Tag, and where field, value and what follows begin. Raises `ValueError` or `IndexError`."""
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
    """Where a value with its length before it begins and ends."""
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
    """The value and where it ends. Raises `IndexError` where it does not, or `ValueError`."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number of more than ten bytes")
