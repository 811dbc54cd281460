"""Page of shared memory with the latest reading of an engine, written by its process.

A reading has a fixed layout and a checksum, and there are two places for it, used in turns: a
reader that comes while one is being written finds the one before it.
"""

import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

from baton.engine.core.reports import EngineReading
from baton.engine.metering.step_times import TimeSpent
from baton.engine.metering.work_meter import WorkDone
from baton.engine.scheduler.scheduler_stats import SchedulerStats

_NUM_STATS: Final = len(fields(SchedulerStats))
_NUM_WORK: Final = len(fields(WorkDone))
_stats_of = attrgetter(*(f"stats.{each.name}" for each in fields(SchedulerStats)))
_work_of = attrgetter(*(f"work_done.{each.name}" for each in fields(WorkDone)))
_time_of = attrgetter(*(f"time_spent.{each.name}" for each in fields(TimeSpent)))
# Number of the reading; stats; work done; time spent; late compilations; idle since, or NaN.
_LAYOUT: Final = struct.Struct(f"<Q{_NUM_STATS}q4qd2q3dqd")
_CHECKSUM: Final = struct.Struct("<I")
_PLACE_BYTES: Final = 1024
_NEVER: Final = float("nan")


class ReadingPage:
    """Page for readings, over a descriptor that belongs to it. One process writes, one reads."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 2 * _PLACE_BYTES)
        self._number = 0

    @classmethod
    def create(cls) -> "ReadingPage":
        descriptor = os.memfd_create("baton-reading", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 2 * _PLACE_BYTES)
        return cls(descriptor)

    def close(self) -> None:
        """Closes the descriptor; the latest reading can still be read."""
        os.close(self.descriptor)

    def write(self, reading: EngineReading) -> None:
        """Writes a reading; the earlier one stays until the next."""
        self._number += 1
        content = _LAYOUT.pack(
            self._number,
            *_stats_of(reading),
            *_work_of(reading),
            *_time_of(reading),
            reading.num_late_compilations,
            _NEVER if reading.idle_since is None else reading.idle_since,
        )
        start = self._number % 2 * _PLACE_BYTES
        content += _CHECKSUM.pack(zlib.crc32(content))
        self._memory[start : start + len(content)] = content

    def read(self) -> EngineReading:
        """Returns the latest complete reading. The first must have been written."""
        return _reading(*max(self._complete())[1:])

    def _complete(self) -> Iterator[tuple[Any, ...]]:
        for start in (0, _PLACE_BYTES):
            content = self._memory[start : start + _LAYOUT.size + _CHECKSUM.size]
            (checksum,) = _CHECKSUM.unpack_from(content, _LAYOUT.size)
            if zlib.crc32(content[: _LAYOUT.size]) == checksum:
                yield _LAYOUT.unpack_from(content)


def _reading(*numbers: Any) -> EngineReading:
    stats, numbers = numbers[:_NUM_STATS], numbers[_NUM_STATS:]
    work, numbers = numbers[:_NUM_WORK], numbers[_NUM_WORK:]
    *time, num_late_compilations, idle_since = numbers
    return EngineReading(
        SchedulerStats(*stats),
        WorkDone(*work),
        TimeSpent(*time),
        num_late_compilations,
        None if math.isnan(idle_since) else idle_since,
    )
