"""Encoder inputs: spans of a prompt that an encoder fills, such as images, as plain data.

Carries the tensors that an encoder computes from, and reads none of them.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

CONTENT_HASH_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class TensorData:
    """Tensor as plain data.

    Attributes:
        dtype: name of the element type, as torch has it, such as "float32".
        data: the elements, row-major and little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Encoder output for the tokens [start, start + length) of a sequence, one row per token.

    Attributes:
        content_hash: covers everything that the output depends on, its length included.
        tensors: what the encoder computes the output from, by the names of the model's processor;
            those of one content hash are equal.
    """

    content_hash: bytes
    start: int
    length: int
    tensors: Mapping[str, TensorData] = field(default_factory=dict, compare=False, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.length

    def salted(self, salt: bytes) -> "EncoderInput":
        """Returns the input with a content hash that only inputs of the same `salt` have. An empty
        one changes nothing."""
        if not salt:
            return self
        digest = hashlib.sha256(b"baton.salt" + self.content_hash + salt).digest()
        return replace(self, content_hash=digest[:CONTENT_HASH_BYTES])

    @property
    def hashed(self) -> tuple[int, int, bytes]:
        """Returns what chain hashes cover of it (`baton.cluster.prefix.HashedInput`)."""
        return self.start, self.end, self.content_hash


def content_hash(processor: bytes, tensors: Mapping[str, TensorData]) -> bytes:
    """Returns the content hash of an encoder input: the truncated SHA-256 of the processor's
    identity and, in the order of their names, of each tensor's name, dtype, shape and elements.
    Each field follows its length.

    Args:
        processor: identity of the processor: its configuration.
    """
    digest = hashlib.sha256(b"baton.image")
    fields = [processor]
    for name, tensor in sorted(tensors.items()):
        shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        fields += [name.encode(), tensor.dtype.encode(), shape, tensor.data]
    for each in fields:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)
    return digest.digest()[:CONTENT_HASH_BYTES]
