"""Budgets of tests: seconds of an idle machine that a test of every commit's lanes may take.

A loaded machine makes tests slower, and none of them may fail for that. So a test is charged its
wall time only if hardly any task of the machine waited meanwhile (the kernel counts that), and
otherwise half the CPU time of its process and of the children that have ended: waiting does not
increase that, and neighbours in caches and on hyperthreads at most double it. What a fixture of a
module or session does is shared, and charged to no test. Neither is what a test is the first to
import or compile, wherever its second run in a process decides (`Twice`), nor how slow the machine
is at the time (`slowness`).
"""

import os
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.support import randomness

IN_PROCESS_SECONDS = 5.0
END_TO_END_SECONDS = 15.0

_READ_EVERY = 0.25  # seconds; reading the kernel's counts takes half a millisecond
_HARDLY_ANY = 0.1  # of the wall time; the kernel's counts are means over the cores
_NUM_ADDITIONS, _ADDING_SECONDS = 1_000_000, 0.05  # in a loop, on a machine that budgets are for
_CROWDED = 2.0  # CPU time on a loaded machine, at most, in that of an idle one


def budget_of(marks: Set[str], chosen_seed: int | None = randomness.CHOSEN_SEED) -> float | None:
    """Returns the seconds of a test with these marks; None for tests of other lanes, and in a run
    with a chosen seed, whose tests may draw what takes longer. A kernel that the emulator runs is
    compiled by the test that launches it first."""
    if marks & {"nightly", "gpu"} or chosen_seed is not None:
        return None
    return END_TO_END_SECONDS if marks & {"e2e", "emulated"} else IN_PROCESS_SECONDS


@dataclass(frozen=True)
class Clocks:
    """Times in seconds, since anything.

    Attributes:
        wall: time that passes.
        cpu: time that cores worked for this process and for its children that have ended.
        waiting: time in which some task of the machine waited for a core, a disk or memory, or the
            machine itself for its host.
    """

    wall: float
    cpu: float
    waiting: float

    @classmethod
    def now(cls) -> "Clocks":
        times, wall = os.times(), time.monotonic()
        cpu = times.user + times.system + times.children_user + times.children_system
        waiting = _waiting(int(wall / _READ_EVERY))
        return cls(wall, cpu, wall if waiting is None else waiting)

    def __add__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall + other.wall, self.cpu + other.cpu, self.waiting + other.waiting)

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall - other.wall, self.cpu - other.cpu, self.waiting - other.waiting)

    @property
    def charged(self) -> float:
        """Seconds of an idle machine, of a difference of two times."""
        return self.wall if self.waiting <= _HARDLY_ANY * self.wall else self.cpu / _CROWDED


@lru_cache(maxsize=1)
def _waiting(_moment: int) -> float | None:
    """Returns None if the kernel does not count: then some task may always have waited."""
    try:
        pressures = [Path(f"/proc/pressure/{each}").read_text() for each in ("cpu", "io", "memory")]
        stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    except OSError:
        return None
    totals = (int(text.split("\n", 1)[0].rpartition("total=")[2]) for text in pressures)
    return sum(totals) / 1e6 + stolen / os.sysconf("SC_CLK_TCK")


def slowness() -> float:
    """Returns how many times slower this machine computes than one that budgets are for; at least
    1."""
    return max(1.0, min(_seconds_of_additions() for _ in range(5)) / _ADDING_SECONDS)


def _seconds_of_additions() -> float:
    began, total = time.process_time(), 0
    for number in range(_NUM_ADDITIONS):
        total += number
    return time.process_time() - began


class Meter:
    """Pytest plugin that sets `charged` and `budget`, in seconds, in the last report of a test."""

    def __init__(self, slowness: float = 1.0) -> None:
        self._slowness = slowness
        self._began = Clocks.now()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._began = Clocks.now()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        began = Clocks.now()
        try:
            return (yield)
        finally:
            self._began += Clocks.now() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        if report.when == "teardown":
            report.charged = (Clocks.now() - self._began).charged / self._slowness
            report.budget = budget_of({mark.name for mark in item.iter_markers()})
        return report


class Twice:
    """Pytest plugin that runs each test twice, and has the second run reported."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        runtestprotocol(item, log=False, nextitem=None)
