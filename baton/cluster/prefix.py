"""Chain hash: the identity of a full KV block, given all tokens before it.

    root = SHA-256(version | namespace | salt | adapter)             truncated to 16 bytes
    h_i  = SHA-256(h_{i-1} | tokens of block i | extras of block i)  truncated to 16 bytes

Every field is length-prefixed and little-endian, so the bytes are the same on every machine and
Python. The root includes the namespace: through the chain it is part of every hash.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

ENCODING_VERSION = 1
HASH_BYTES = 16

BlockHash = bytes
HashedInput = tuple[int, int, bytes]
"""Multimodal input as chain hashes cover it: its tokens [start, end), and its content hash."""

_sha256 = hashlib.sha256


@dataclass(frozen=True, slots=True)
class PrefixNamespace:
    """Namespace of chain hashes: workers' blocks are interchangeable only if theirs are equal.

    Attributes:
        model: fingerprint of the weights and their configuration.
        tokenizer: hash of the tokenizer.
        kv_dtype: element type of the cache, such as "float32".
        block_size: tokens per block.
    """

    model: bytes
    tokenizer: bytes
    kv_dtype: str
    block_size: int

    def root(self, salt: bytes = b"", adapter: bytes = b"") -> BlockHash:
        """Returns the parent hash of a sequence's first block. Equal prefixes with different salts
        or adapters have different hashes."""
        fields = [self.model, self.tokenizer, self.kv_dtype.encode(), salt]
        if adapter:
            fields.append(adapter)
        header = struct.pack("<II", ENCODING_VERSION, self.block_size)
        return _digest(b"baton.prefix" + header + b"".join(map(_prefixed, fields)))


def extend_chain(
    hashes: list[BlockHash],
    root: BlockHash,
    encoded: bytes,
    block_size: int,
    extras_of: Callable[[int], bytes] | None = None,
) -> None:
    """Appends the hashes of the full blocks that follow those in `hashes`.

    Args:
        encoded: the tokens after the blocks in `hashes`, as `encode_tokens` returns them.
        extras_of: returns the extras of a block, by its number in the chain. None: there are none.
    """
    parent = hashes[-1] if hashes else root
    width = block_size * 4
    for start in range(0, len(encoded) - width + 1, width):
        data = parent + encoded[start : start + width]
        if extras_of is not None and (extras := extras_of(len(hashes))):
            data += _prefixed(extras)
        parent = _sha256(data).digest()[:HASH_BYTES]
        hashes.append(parent)


def input_extras(inputs: Iterable[HashedInput], block_size: int, index: int) -> bytes:
    """Returns the extras of a block with multimodal inputs (images, audio): for each input that
    overlaps the block, its start relative to the block's start and its content hash.

    Args:
        inputs: in the order of their starts.
        index: the block's number in the chain.
    """
    begin, end = index * block_size, (index + 1) * block_size
    return b"".join(
        struct.pack("<i", start - begin) + _prefixed(content)
        for start, stop, content in inputs
        if start < end and stop > begin
    )


def hash_chain(
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    inputs: Sequence[HashedInput] = (),
) -> list[BlockHash]:
    """Returns the chain hashes of all full blocks of `token_ids`, with `inputs` among them."""
    hashes: list[BlockHash] = []
    extras_of = partial(input_extras, inputs, block_size) if inputs else None
    extend_chain(hashes, root, encode_tokens(token_ids), block_size, extras_of)
    return hashes


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns the tokens as 4 bytes each, little-endian."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _digest(data: bytes) -> BlockHash:
    return _sha256(data).digest()[:HASH_BYTES]


def _prefixed(field: bytes) -> bytes:
    return struct.pack("<I", len(field)) + field
