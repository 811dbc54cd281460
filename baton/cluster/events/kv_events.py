"""KV events of a worker's prefix cache, and their format in Redis.

Per worker epoch Redis holds a snapshot and the tail of a stream. The stream's entries are
`EventBatch`es, each with the id `<last>-0`. Sequence numbers count the events of the epoch from 1,
so a reader at sequence s continues after `s-0` and detects missed events by `first`.

The snapshot is a string: a sequence number s (8 bytes, little-endian; 0 while it is not complete),
then 16-byte slots, each the hash of a cached block, or zeros. Every slot is as it was after event s
or later (`baton.cluster.events.compaction`), so that the snapshot plus all events after s is exact.
Independent of connections.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from baton.cluster.prefix import HASH_BYTES, BlockHash

SEQUENCE_BYTES = 8
MAX_BATCH_BYTES = 2**20  # of one stream entry; a worker writes a quarter of it at most
EMPTY_SLOT = bytes(HASH_BYTES)

_SEQUENCE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Changes of a worker's prefix cache, in this order: all hashes are cleared if `cleared`, then
    hashes are removed, then hashes are stored. False if there are none."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.cleared)

    def merged(self, other: "KvEvents") -> "KvEvents":
        """Returns these events and those of another cache, which were drained at the same time, and
        cleared together."""
        if not other:
            return self
        return KvEvents(
            self.stored + other.stored,
            self.removed + other.removed,
            self.cleared or other.cleared,
        )


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Batch of the events numbered [first, last], merged into one of the same effect."""

    first: int
    last: int
    events: KvEvents

    @property
    def entry_id(self) -> str:
        """Id of its stream entry."""
        return entry_id(self.last)

    def to_fields(self) -> dict[str, str | bytes | int]:
        """Returns the batch as the fields of a stream entry."""
        return {
            "first": self.first,
            "last": self.last,
            "stored": b"".join(self.events.stored),
            "removed": b"".join(self.events.removed),
            "cleared": int(self.events.cleared),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> "EventBatch":
        """Returns the batch that `to_fields` wrote.

        Raises:
            ValueError: a field is missing, malformed or too long.
        """
        num_bytes = sum(map(len, fields.values()))
        if num_bytes > MAX_BATCH_BYTES:
            raise ValueError(f"it has {num_bytes} bytes; expected at most {MAX_BATCH_BYTES}")
        try:
            events = KvEvents(
                stored=_split(fields[b"stored"]),
                removed=_split(fields[b"removed"]),
                cleared=int(fields[b"cleared"]) != 0,
            )
            first, last = int(fields[b"first"]), int(fields[b"last"])
        except KeyError as error:
            raise ValueError(f"field {error} is missing") from error
        if not 0 < first <= last:
            raise ValueError(f"its events are numbered {first} to {last}")
        return cls(first, last, events)


def entry_id(sequence: int) -> str:
    """Returns the id of the stream entry whose last event is numbered `sequence`."""
    return f"{sequence}-0"


def encode_sequence(sequence: int) -> bytes:
    """Returns the head of a snapshot with that sequence number."""
    return _SEQUENCE.pack(sequence)


def decode_sequence(data: bytes) -> int:
    """Returns the number that `encode_sequence` wrote; 0 if `data` has another length."""
    return int(_SEQUENCE.unpack(data)[0]) if len(data) == SEQUENCE_BYTES else 0


def slots_offset(slot: int) -> int:
    """Returns the offset of a slot in a snapshot, in bytes."""
    return SEQUENCE_BYTES + slot * HASH_BYTES


def decode_slots(data: bytes) -> tuple[BlockHash, ...]:
    """Returns the hashes in some slots of a snapshot, without empty slots.

    Raises:
        ValueError: `data` is not a whole number of slots.
    """
    return tuple(filter(EMPTY_SLOT.__ne__, _split(data)))


def _split(data: bytes) -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return struct.unpack(f"{HASH_BYTES}s" * (len(data) // HASH_BYTES), data)
