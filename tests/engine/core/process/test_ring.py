"""Rings: every record arrives once, whole and in order, however little fits at a time."""

import os
import threading
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.process.ring import Ring, RingReader, RingWriter

RECORDS = st.lists(st.binary(max_size=200), max_size=20)


class Pair:
    """Both ends of a ring."""

    def __init__(self, num_bytes: int) -> None:
        self.ring = Ring.create(num_bytes)
        self.num_backlogs = 0
        self.writer = RingWriter(self.ring, on_backlog=self._count)
        self.reader = RingReader(self.ring)

    def _count(self) -> None:
        self.num_backlogs += 1

    def read_all(self) -> list[bytes]:
        records = self.reader.read()
        while self.writer.has_backlog:
            self.writer.flush()
            records += self.reader.read()
        return records


@given(RECORDS, st.integers(1, 300), st.data())
def test_ring_keeps_records_whole_and_in_order(records, num_bytes, data):
    pair, received = Pair(num_bytes), []
    for record in records:
        pair.writer.write(record)
        if data.draw(st.booleans()):
            received += pair.reader.read()
        if data.draw(st.booleans()):
            pair.writer.flush()
    received += pair.read_all()
    assert received == records
    pair.ring.close()


def test_ring_calls_on_backlog_once_until_it_is_written():
    pair = Pair(16)
    pair.writer.write(b"fits in it")
    assert pair.num_backlogs == 0
    pair.writer.write(b"does not fit any more")
    pair.writer.write(b"neither")
    assert pair.num_backlogs == 1
    assert pair.read_all() == [b"fits in it", b"does not fit any more", b"neither"]
    pair.writer.write(bytes(100))
    assert pair.num_backlogs == 2
    pair.ring.close()


def test_ring_passes_records_between_threads_with_a_full_backlog():
    pair = Pair(64)
    records = deque(os.urandom(n % 97) for n in range(3000))
    expected, received = list(records), []

    def write() -> None:
        for record in expected:
            pair.writer.write(record, max_backlog=128)

    writing = threading.Thread(target=write)
    writing.start()
    while len(received) < len(expected):
        received += pair.reader.read()
        assert pair.writer._num_waiting <= 128 + 4 + 97
        pair.writer.flush()
    writing.join(30)
    assert received == expected
    pair.ring.close()
