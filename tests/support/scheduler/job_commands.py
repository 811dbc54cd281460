"""Encode jobs of a scheduler under test, and what is checked of their answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from baton.engine.scheduler.kv.encoder_cache import EncoderOutput, HeldOutput
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.models.images.encoder_input import EncoderInput
from tests.support.scheduler.fakes import FakeRunner


@dataclass
class Job:
    """A job that is not released yet."""

    encoder_input: EncoderInput
    is_arrival: bool
    held: HeldOutput | None = None

    @property
    def arrives(self) -> bool:
        return self.is_arrival and self.held is not None and bool(self.held.block_ids)


class JobCommands:
    """Begins and ends the jobs of a scheduler; other workers' outputs arrive in its runner."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        self.open: dict[int, Job] = {}
        self._scheduler = scheduler
        self._runner = runner
        self._numbers = count(1)

    def begin(self, content_hash: bytes, length: int, *, is_arrival: bool) -> None:
        number, wanted = next(self._numbers), EncoderInput(content_hash, 0, length)
        self.open[number] = Job(wanted, is_arrival)
        if is_arrival:
            self._scheduler.encode_jobs.expect(number, EncodeJob(wanted))
        else:
            self._scheduler.encode_jobs.encode(number, EncodeJob(wanted))

    def end(self, number: int, *, commits: bool) -> None:
        """Ends a job; `commits`: if its output arrives, all of it has."""
        job = self.open.pop(number)
        if commits and job.arrives:
            self._scheduler.encode_jobs.commit(number)
            assert job.encoder_input.content_hash in self._scheduler.encode_jobs.cache
        self._scheduler.encode_jobs.release(number)

    def take(self, answers: Iterable[HeldOutput]) -> None:
        """Takes the answers of a step that is done, and writes the blocks of what arrives."""
        for held in answers:
            job = self.open.get(held.number)
            if job is None:
                continue  # released since
            assert job.held is None, "answered twice"
            job.held = held
            blocks = dict.fromkeys(held.block_ids, EncoderOutput(job.encoder_input, held.block_ids))
            if job.is_arrival:
                assert held.was_cached == (not held.block_ids)
                self._runner.encoded.update(blocks)

    def check(self) -> None:
        """Asserts that no other output is in the blocks that jobs hold."""
        for job in self.open.values():
            for block_id in () if job.held is None else job.held.block_ids:
                found = self._runner.encoded[block_id].encoder_input.content_hash
                assert found == job.encoder_input.content_hash, "a held block was reused"
