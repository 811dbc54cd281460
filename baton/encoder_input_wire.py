"""Conversion of `baton.encoder_input.EncoderInput` to its message and back, for all packages."""

from baton.encoder_input import CONTENT_HASH_BYTES, EncoderInput, TensorData
from baton.errors import InvalidArgumentError
from baton.v1 import encoder_pb2 as pb


def to_proto(encoder_input: EncoderInput) -> pb.EncoderInput:
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


def from_proto(message: pb.EncoderInput, field: str) -> EncoderInput:
    """Returns the encoder input. Raises `InvalidArgumentError`, which names `field`, for a content
    hash of another length; what fits a model and a prompt is for the engine to check."""
    if len(message.content_hash) != CONTENT_HASH_BYTES:
        raise InvalidArgumentError(
            f"{field}.content_hash",
            f"has {len(message.content_hash)} bytes; expected {CONTENT_HASH_BYTES}",
        )
    tensors = {
        name: TensorData(tensor.dtype, tuple(tensor.shape), tensor.data)
        for name, tensor in message.tensors.items()
    }
    return EncoderInput(message.content_hash, message.start, message.length, tensors)
