"""Messages between the router and a process that decodes images, and their frames.

A frame is the length of a message in 8 bytes, little-endian, and the message in MessagePack.
"""

from typing import Final

import msgspec
from msgspec import Struct

from baton.models.images.encoder_input import TensorData
from baton.models.images.image_format import ImageFormat
from baton.models.images.image_format_codec import decode_image_format

LENGTH_BYTES: Final = 8


class Start(Struct, frozen=True, tag=True):
    """First message to the process.

    Attributes:
        path: folder of the checkpoint.
        memory_bytes: address space that the process may use.
    """

    path: str
    max_pixels: int
    memory_bytes: int
    max_tensor_bytes: int


class Ready(Struct, frozen=True, tag=True):
    """Facts of the checkpoint's processor.

    Attributes:
        identity: part of the content hash of each image.
        placeholder: token that stands for an image in a text that is not expanded.
        format: None: the model takes no images.
    """

    identity: bytes
    placeholder: str
    placeholder_id: int
    format: ImageFormat | None


class Job(Struct, frozen=True, tag=True):
    """Image or clip to decode and preprocess: an encoded file.

    Attributes:
        max_frames: frames that are taken of it, evenly spaced; 1: the first.
    """

    file: bytes
    max_frames: int = 1


class PreprocessedImage(Struct, frozen=True):
    """Preprocessed image.

    Attributes:
        replacement: text that the processor puts in place of the placeholder.
        tensors: of the image, by the processor's names.
    """

    replacement: str
    tensors: dict[str, TensorData]


class Done(Struct, frozen=True, tag=True):
    """Preprocessed frames of a file, in order; of an image one."""

    frames: list[PreprocessedImage]


class Refused(Struct, frozen=True, tag=True):
    """Image or checkpoint that the process refuses. `problem` follows the field in an error."""

    problem: str


ImageReply = Ready | Done | Refused

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Start | Job)
_answers = msgspec.msgpack.Decoder(ImageReply, dec_hook=decode_image_format)


def frame(message: Start | Job | ImageReply) -> bytes:
    """Returns a message with its length."""
    content = _encoder.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def read_request(content: bytes) -> Start | Job:
    """Returns a message to the process."""
    request: Start | Job = _requests.decode(content)
    return request


def read_answer(content: bytes) -> ImageReply:
    """Returns a message of the process. Raises `msgspec.DecodeError`."""
    answer: ImageReply = _answers.decode(content)
    return answer
