"""Signatures of a snapshot in Redis: one of its sequence number, and one of each `CHUNK` slots, so
that a slice of the snapshot is signed with the work of that slice. Independent of connections.

They are a string beside the snapshot, 16 bytes each, the one of the sequence number first.
"""

from baton.cluster.events.kv_events import decode_slots, encode_sequence
from baton.cluster.prefix import HASH_BYTES, BlockHash
from baton.cluster.redis.signing import SigningKeys

CHUNK = 64  # slots
_BYTES = 16  # of a signature, which is cut off
_CHUNK_BYTES = CHUNK * HASH_BYTES


class SnapshotSignatures:
    """Signatures of one snapshot. Slots begin at multiples of `CHUNK`.

    Args:
        keys: keys of the signatures.
        key: Redis key of the snapshot.
    """

    def __init__(self, keys: SigningKeys, key: str) -> None:
        self._keys = keys
        self._key = key.encode()

    def sign_sequence(self, sequence: int) -> bytes:
        """Returns the signature of a sequence number."""
        return self._keys.sign(self._key, b"sequence", encode_sequence(sequence))[:_BYTES]

    def sign_slots(self, start: int, data: bytes) -> bytes:
        """Returns the signatures of the slots from `start` on, whose content is `data`."""
        return b"".join(
            self._keys.sign(self._key, _number(start, at), data[at : at + _CHUNK_BYTES])[:_BYTES]
            for at in range(0, len(data), _CHUNK_BYTES)
        )

    def is_sequence(self, head: bytes, signature: bytes) -> bool:
        """Returns whether `head`, a sequence number as it is stored, has that signature."""
        return self._keys.is_signed(signature, self._key, b"sequence", head)

    def signed_slots(
        self, start: int, data: bytes, signatures: bytes
    ) -> tuple[BlockHash, ...] | None:
        """Returns the hashes in the slots from `start` on; None if any was not signed. `data` is a
        whole number of slots."""
        for at in range(0, len(data), _CHUNK_BYTES):
            first = at // _CHUNK_BYTES * _BYTES
            chunk, signature = data[at : at + _CHUNK_BYTES], signatures[first : first + _BYTES]
            if not self._keys.is_signed(signature, self._key, _number(start, at), chunk):
                return None
        return decode_slots(data)


def signatures_range(start: int, num_slots: int) -> tuple[int, int]:
    """Returns the first and the last byte of the signatures of slots, in their string."""
    first = _BYTES * (1 + start // CHUNK)
    return first, first + _BYTES * (num_slots // CHUNK) - 1


def _number(start: int, at: int) -> bytes:
    return str(start // CHUNK + at // _CHUNK_BYTES).encode()
