"""Ring buffer in shared memory: records from one process to another, without locks between them.

The bytes are in a memfd that both map; two eventfds count them. The writer adds to `filled` what it
has written, the reader to `freed` what it has read, and each takes the other's count before it
touches those bytes. So the kernel orders the memory accesses, on every CPU, and an event loop can
wait by file descriptor. Records are byte strings of any length; a long one passes in parts.

Nothing has a name: whatever way both processes end, nothing is left.
"""

import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Ring:
    """File descriptors of one ring, which belong to it until `close`.

    Attributes:
        memory: memfd of the bytes.
        filled, freed: eventfds of the bytes written and read.
    """

    memory: int
    filled: int
    freed: int

    @classmethod
    def create(cls, num_bytes: int) -> Self:
        """Makes a ring of `num_bytes`."""
        memory = os.memfd_create("baton-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, num_bytes)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        return cls(memory, os.eventfd(0, flags), os.eventfd(0, flags))

    @property
    def descriptors(self) -> list[int]:
        """The descriptors in the order of the fields, to be sent to another process."""
        return [self.memory, self.filled, self.freed]

    def map(self) -> mmap.mmap:
        return mmap.mmap(self.memory, os.fstat(self.memory).st_size)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


class RingWriter:
    """Writing end of a ring. Any thread may call its methods.

    What does not fit waits in the backlog, in order, until `flush` is called after the reader has
    freed space.
    """

    def __init__(self, ring: Ring, on_backlog: Callable[[], None] = lambda: None) -> None:
        """`on_backlog` is called when the backlog begins; `flush` is due once `ring.freed` is
        readable."""
        self._ring = ring
        self._memory = ring.map()
        self._num_free = self._size = len(self._memory)
        self._position = 0
        self._on_backlog = on_backlog
        self._backlog: deque[memoryview] = deque()
        self._num_waiting = 0
        self._changed = threading.Condition()

    @property
    def has_backlog(self) -> bool:
        return self._num_waiting > 0

    def write(self, record: bytes, max_backlog: int | None = None) -> None:
        """Writes a record, as far as there is space. Waits while the backlog has more than
        `max_backlog` bytes, which another thread must flush; None: never."""
        with self._changed:
            had_backlog = self.has_backlog
            for part in (_LENGTH.pack(len(record)), record):
                self._backlog.append(memoryview(part))
                self._num_waiting += len(part)
            self._flush()
            if self.has_backlog and not had_backlog:
                self._on_backlog()
            if max_backlog is not None:
                self._changed.wait_for(lambda: self._num_waiting <= max_backlog)

    def flush(self) -> None:
        """Writes the backlog, as far as there is space."""
        with self._changed:
            self._flush()
            self._changed.notify_all()

    def _flush(self) -> None:
        num_written = 0
        self._num_free += _taken(self._ring.freed)
        while self._backlog and self._num_free:
            part = self._backlog.popleft()
            count = min(len(part), self._num_free, self._size - self._position)
            self._memory[self._position : self._position + count] = part[:count]
            self._position = (self._position + count) % self._size
            self._num_free -= count
            num_written += count
            if count < len(part):
                self._backlog.appendleft(part[count:])
        self._num_waiting -= num_written
        if num_written:
            os.eventfd_write(self._ring.filled, num_written)


class RingReader:
    """Reading end of a ring, of one thread. `ring.filled` is readable when there is more."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._memory = ring.map()
        self._position = 0
        self._unread = bytearray()

    def read(self) -> list[bytes]:
        """Returns the records that are complete by now, in order."""
        count = _taken(self._ring.filled)
        if count:
            first = min(count, len(self._memory) - self._position)
            self._unread += self._memory[self._position : self._position + first]
            self._unread += self._memory[: count - first]
            self._position = (self._position + count) % len(self._memory)
            os.eventfd_write(self._ring.freed, count)
        return self._complete_records()

    def _complete_records(self) -> list[bytes]:
        records, start, unread = [], 0, self._unread
        while len(unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, start)
            end = start + _LENGTH.size + length
            if end > len(unread):
                break
            records.append(bytes(unread[start + _LENGTH.size : end]))
            start = end
        del unread[:start]
        return records


def _taken(counter: int) -> int:
    """Takes the count of an eventfd; 0 if it is zero."""
    try:
        return os.eventfd_read(counter)
    except BlockingIOError:
        return 0
