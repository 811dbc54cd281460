"""The events of a Fetch as bytes: as protobuf would have them, and whatever else may arrive."""

import tracemalloc

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import prefill_pb2
from baton_kvtransfer.stream.block_batch import BlockBatch
from baton_kvtransfer.stream.frames import decode, encode

numbers = st.integers(0, 2**32 - 1)
runs = st.builds(
    BlockBatch,
    group=numbers,
    first_block=numbers,
    checksums=st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple),
    payload=st.lists(st.binary(min_size=1, max_size=200), max_size=3).map(
        lambda pieces: tuple(map(memoryview, pieces))
    ),
    source_blocks=st.lists(numbers, max_size=4).map(tuple),
)
others = st.one_of(
    st.builds(
        lambda g, n: pb.FetchResponse(manifest=pb.Manifest(generation=g, num_blocks=n)),
        numbers,
        numbers,
    ),
    st.builds(
        lambda t: pb.FetchResponse(
            result=prefill_pb2.PrefillResult(first_tokens=[prefill_pb2.FirstToken(token_id=t)])
        ),
        numbers,
    ),
)


def message_of(run: BlockBatch) -> pb.FetchResponse:
    return pb.FetchResponse(
        blocks=pb.BlockRun(
            group=run.group,
            first_block=run.first_block,
            payload=b"".join(run.payload),
            checksums=run.checksums,
            source_blocks=run.source_blocks,
        )
    )


def same(one: BlockBatch, other: BlockBatch) -> bool:
    return message_of(one) == message_of(other)


@given(run=runs)
def test_block_batch_encodes_as_its_protobuf_message(run):
    assert pb.FetchResponse.FromString(encode(run)) == message_of(run)
    assert same(decode(encode(run)), run)


@given(run=runs)
def test_block_batch_decodes_from_any_protobuf_encoder(run):
    assert same(decode(message_of(run).SerializeToString()), run)


@given(response=others)
def test_fetch_events_without_blocks_round_trip(response):
    assert decode(encode(response)) == response


def test_block_batch_decodes_without_copying_payload():
    content = bytes(2**20)
    data = encode(BlockBatch(0, 3, (7,), (memoryview(content),)))
    tracemalloc.start()
    run = decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert run.num_bytes == 2**20
    assert peak < 2**17


def test_block_batch_takes_last_payload_and_any_field_order():
    part = pb.BlockRun(payload=b"second", group=1).SerializeToString()
    body = pb.BlockRun(payload=b"first", checksums=[5]).SerializeToString() + part
    data = b"\x12" + bytes([len(body)]) + body
    assert pb.FetchResponse.FromString(data).blocks.payload == b"second"
    assert same(decode(data), BlockBatch(1, 0, (5,), (memoryview(b"second"),)))


@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\x12")
@example(data=b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(data=b"\x12\x06\x1a\xff\xff\xff\xff\x0f")
@example(data=b"\x12\x02\x1b\x00")
def test_decode_never_raises_on_arbitrary_bytes(data):
    check_any(data)


@given(run=runs, data=st.data())
def test_decode_never_raises_on_damaged_event(run, data):
    encoded = bytearray(encode(run))
    for _ in range(data.draw(st.integers(1, 3))):
        if encoded:
            place = data.draw(st.integers(0, len(encoded) - 1))
            encoded[place] = data.draw(st.integers(0, 255))
    check_any(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def check_any(data: bytes) -> None:
    """Never raises; and where it finds a run, that is the one protobuf finds."""
    found = decode(data)
    try:
        response = pb.FetchResponse.FromString(data)
    except DecodeError:
        response = None
    if isinstance(found, BlockBatch) and response is not None:
        assert message_of(found) == without_unknown(response)
    if isinstance(found, pb.FetchResponse):
        assert found == response


def without_unknown(response: pb.FetchResponse) -> pb.FetchResponse:
    response.DiscardUnknownFields()
    return response


@pytest.mark.parametrize("size", [1, 127, 128, 2**14, 2**21])
def test_block_batch_round_trips_payloads_of_every_length(size):
    run = BlockBatch(1, 2, (3,), (memoryview(bytes(size)),))
    assert pb.FetchResponse.FromString(encode(run)) == message_of(run)
    assert same(decode(encode(run)), run)
