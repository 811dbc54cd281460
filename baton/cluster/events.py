"""KV events: what a worker tells of its cache, and how that lies in Redis.

Per worker epoch Redis holds a stream of `EventBatch` entries, each under the id `<last>-0`, and one
`Snapshot`. Sequence numbers count the events of the epoch from 1, so a reader at sequence s reads
on after `s-0` and knows by `first` whether it missed something. Knows nothing of connections.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.cluster.prefix import HASH_BYTES, BlockHash

SEQUENCE_BYTES = 8

_SEQUENCE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class KvEvents:
    """What changed in a worker's cache: first all is cleared (if it is), then hashes are removed,
    then hashes are stored."""

    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events numbered [first, last], as one that has their joint effect."""

    first: int
    last: int
    events: KvEvents

    @property
    def entry_id(self) -> str:
        """The id of its entry in the stream."""
        return entry_id(self.last)

    def to_fields(self) -> dict[str, str | bytes | int]:
        """The batch as the fields of a stream entry."""
        return {
            "first": self.first,
            "last": self.last,
            "stored": b"".join(self.events.stored),
            "removed": b"".join(self.events.removed),
            "cleared": int(self.events.cleared),
        }

    @classmethod
    def from_fields(cls, fields: Mapping[bytes, bytes]) -> "EventBatch":
        """The batch that `to_fields` wrote.

        Raises:
            ValueError: a field is missing or malformed.
        """
        try:
            events = KvEvents(
                stored=_split(fields[b"stored"]),
                removed=_split(fields[b"removed"]),
                cleared=int(fields[b"cleared"]) != 0,
            )
            return cls(int(fields[b"first"]), int(fields[b"last"]), events)
        except KeyError as error:
            raise ValueError(f"field {error} is missing") from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All hashes findable on a worker after the event numbered `sequence`."""

    sequence: int
    hashes: tuple[BlockHash, ...]

    def to_bytes(self) -> bytes:
        """The sequence number (8 bytes, little-endian), then the hashes."""
        return encode_sequence(self.sequence) + b"".join(self.hashes)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Snapshot":
        """The snapshot that `to_bytes` wrote.

        Raises:
            ValueError: it is malformed.
        """
        if len(data) < SEQUENCE_BYTES:
            raise ValueError(f"a snapshot of {len(data)} bytes holds no sequence number")
        (sequence,) = _SEQUENCE.unpack_from(data)
        return cls(sequence, _split(data[SEQUENCE_BYTES:]))


def entry_id(sequence: int) -> str:
    """The id of the stream entry whose last event is numbered `sequence`."""
    return f"{sequence}-0"


def encode_sequence(sequence: int) -> bytes:
    """What a snapshot of that sequence number begins with."""
    return _SEQUENCE.pack(sequence)


def _split(data: bytes) -> tuple[BlockHash, ...]:
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no whole number of {HASH_BYTES}-byte hashes")
    return tuple(_slices(data))


def _slices(data: bytes) -> Iterable[BlockHash]:
    return (data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES))
