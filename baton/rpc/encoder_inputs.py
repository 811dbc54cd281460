"""Conversion of `EncoderInput` to its message, and back, for all packages."""

from collections.abc import Iterable

from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import CONTENT_HASH_BYTES, EncoderInput, TensorData
from baton.v1 import inference_pb2 as pb

_BYTES = 2  # wire type of fields that follow their length


def encoder_input_to_message(encoder_input: EncoderInput) -> pb.EncoderInput:
    """Returns the message."""
    return pb.EncoderInput(
        content_hash=encoder_input.content_hash,
        start=encoder_input.start,
        length=encoder_input.length,
        tensors={
            name: pb.Tensor(dtype=data.dtype, shape=data.shape, data=data.data)
            for name, data in encoder_input.tensors.items()
        },
    )


def serialized_encoder_inputs(
    encoder_inputs: Iterable[EncoderInput], field_number: int
) -> list[bytes]:
    """Returns the parts of the serialized field `field_number`, which has these messages. Joined
    with a serialized message, before it or after, they add the field to it.

    Copies no tensor. A message copies each five times in all, with the interpreter locked.
    """
    parts: list[bytes] = []
    for each in encoder_inputs:
        head = pb.EncoderInput(content_hash=each.content_hash, start=each.start, length=each.length)
        content = [head.SerializeToString()]
        for name, data in each.tensors.items():
            tensor = [pb.Tensor(dtype=data.dtype, shape=data.shape).SerializeToString()]
            tensor += _field(pb.Tensor.DATA_FIELD_NUMBER, [data.data])
            # An entry of a map is a message of a key, 1, and a value, 2.
            entry = _field(1, [name.encode()]) + _field(2, tensor)
            content += _field(pb.EncoderInput.TENSORS_FIELD_NUMBER, entry)
        parts += _field(field_number, content)
    return parts


def _field(number: int, content: list[bytes]) -> list[bytes]:
    return [_varint(number << 3 | _BYTES) + _varint(sum(map(len, content))), *content]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encoder_input_of(message: pb.EncoderInput, field: str) -> EncoderInput:
    """Returns the encoder input. Raises `InvalidArgumentError`, which names `field`, for a content
    hash of another length; what fits a model and a prompt is for the engine to check."""
    if len(message.content_hash) != CONTENT_HASH_BYTES:
        raise InvalidArgumentError(
            f"{field}.content_hash",
            f"has {len(message.content_hash)} bytes; expected {CONTENT_HASH_BYTES}",
        )
    tensors = tensors_of(message)
    return EncoderInput(message.content_hash, message.start, message.length, tensors)


def tensors_of(message: pb.EncoderInput) -> dict[str, TensorData]:
    """Returns the tensors of an encoder input."""
    return {
        name: TensorData(tensor.dtype, tuple(tensor.shape), tensor.data)
        for name, tensor in message.tensors.items()
    }
