"""Messages of encoder inputs: what a worker reads is what the router had."""

from hypothesis import given
from hypothesis import strategies as some

from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.rpc.encoder_inputs import (
    encoder_input_of,
    encoder_input_to_message,
    serialized_encoder_inputs,
)
from baton.v1 import prefill_pb2

_SHAPES = some.lists(some.integers(0, 2**32 - 1), max_size=4).map(tuple)
_DATA = some.binary(max_size=64) | some.integers(100, 40_000).map(bytes)
_TENSORS = some.builds(TensorData, some.text(max_size=8), _SHAPES, _DATA)
_INPUTS = some.builds(
    EncoderInput,
    content_hash=some.binary(min_size=16, max_size=16),
    start=some.integers(0, 2**32 - 1),
    length=some.integers(0, 2**32 - 1),
    tensors=some.dictionaries(some.text(max_size=200), _TENSORS, max_size=3),
)


@given(some.lists(_INPUTS, max_size=3))
def test_serialized_inputs_are_read_as_their_messages_are(inputs):
    request = prefill_pb2.PrefillRequest(request_id="r", token_ids=range(300))
    number = prefill_pb2.PrefillRequest.ENCODER_INPUTS_FIELD_NUMBER
    parts = [request.SerializeToString(), *serialized_encoder_inputs(inputs, number)]
    read = prefill_pb2.PrefillRequest.FromString(b"".join(parts))
    request.encoder_inputs.extend(map(encoder_input_to_message, inputs))
    assert read == request
    found = [encoder_input_of(each, "images") for each in read.encoder_inputs]
    assert found == inputs
    assert [each.tensors for each in found] == [each.tensors for each in inputs]
