"""A worker's engine whose model is a clock: the real scheduler, pools and prefix cache, stepped in
simulated time.

As in a real engine what is asked of it waits for the end of the step under way. Steps of plain
decodes that are bound to be alike, nothing being allocated, cached, ended or asked in between, are
run in one go: the scheduler plans the first and books the last, and what would have been booked in
between is written to the columns of its slots. If something is asked meanwhile, the run ends with
the step that is under way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from baton.cluster.events.kv_events import KvEvents
from baton.engine.request import FinishReason
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.encoder_cache import NO_ENCODER_STEP, HeldOutput
from baton.engine.scheduler.plan import StepPlan, StepResult
from baton.engine.scheduler.progress import StepProgress
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.batch_slots import Int64Array
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request
from baton_simulator.clock import Clock
from baton_simulator.gaps import FloatArray, Gaps
from baton_simulator.job import Job
from baton_simulator.latency import StepLatency, StepLoad

Command = Callable[[Scheduler], object]

_NO_RESULT = StepResult(np.zeros(0, np.int64))


class Watcher(Protocol):
    """Observer of an engine's events."""

    def on_claimed(self, job: Job, num_held_tokens: int) -> None:
        """It has blocks for a job whose KV comes from elsewhere, and so much of it."""

    def on_computed(self, engine: "SimulatedEngine", job: Job, num_tokens: int) -> None:
        """KV of so many leading tokens of a job is there."""

    def on_token(self, engine: "SimulatedEngine", job: Job, reason: FinishReason | None) -> None:
        """A token that is not a plain decode's."""

    def on_finished(self, job: Job) -> None:
        """A job's last token was decoded."""

    def on_held(self, engine: "SimulatedEngine", held: HeldOutput) -> None:
        """An encode job holds its output, or blocks for it."""

    def on_cache_events(self, engine: "SimulatedEngine", events: KvEvents) -> None:
        """Receives the changes of the engine's prefix cache."""

    def on_stalled(self, engine: "SimulatedEngine") -> None:
        """Handles an engine that has work but cannot proceed on its own."""


class SimulatedEngine:
    """One engine.

    Attributes:
        number: its own among all engines.
        num_steps, num_encoder_tokens: computed so far.
    """

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        num_blocks: int,
        latency: StepLatency,
        clock: Clock,
        watcher: Watcher,
        gaps: Gaps,
        *,
        fast_forward: bool = True,
    ) -> None:
        self.number = number
        self.scheduler = Scheduler(config, [CacheGroup(BlockPool(num_blocks))])
        self.num_blocks = num_blocks
        self.num_steps = 0
        self.num_encoder_tokens = 0
        self._block_size = config.block_size
        self._latency = latency
        self._clock = clock
        self._watcher = watcher
        self._gaps = gaps
        self._fast_forward = fast_forward
        self._jobs: dict[str, Job] = {}
        self._token_of: Int64Array = np.zeros(config.max_num_seqs, np.int64)
        self._inbox: list[Command] = []
        self._plan: StepPlan | None = None
        self._ends: FloatArray = np.zeros(0)
        self._num_launches = 0
        self._is_planning = False

    def add(self, job: Job, request: Request) -> None:
        """Queues a request of a job."""
        self._jobs[request.request_id] = job
        self.submit(lambda scheduler: scheduler.add(request))

    def submit(self, command: Command) -> None:
        """Does something with the scheduler before its next step."""
        self._inbox.append(command)
        if self._plan is not None:
            self._cut_short()
        elif not self._is_planning:
            self._next_step()

    def job(self, request_id: str) -> Job:
        return self._jobs[request_id]

    # The step.

    def _next_step(self) -> None:
        """Plans until there is something to compute, or nothing more can be done."""
        self._is_planning = True
        stalled = False
        while self._plan is None and not stalled:
            for command in self._inbox:
                command(self.scheduler)
            self._inbox.clear()
            if not self.scheduler.has_work:
                self._report_cache_events()
                break
            stalled = not self._plan_one() and not self._inbox
        self._is_planning = False
        if stalled:
            self._watcher.on_stalled(self)

    def _plan_one(self) -> bool:
        """Returns whether another step could do more, or this one computes."""
        plan = self.scheduler.schedule()
        for sequence in plan.new_slots:
            self._token_of[sequence.batch_slot] = self.job(sequence.request.request_id).token_id
        self._report_cache_events()
        for allocation in plan.external:
            num_held = allocation.num_hit_blocks * self._block_size
            self._watcher.on_claimed(self.job(allocation.request_id), num_held)
        if plan.num_tokens or plan.encoder.to_compute:
            self._launch(plan)
            return True
        self.scheduler.apply(plan, _NO_RESULT)
        self._report_held(plan)
        return plan.made_progress

    def _launch(self, plan: StepPlan) -> None:
        num_steps = self._num_alike(plan) if self._fast_forward else 1
        load = _load_of(plan, num_steps)
        self.num_encoder_tokens += load.num_encoder_tokens
        seconds = self._latency.seconds(load)
        # Summed one after the other, as single steps would be.
        self._ends = np.cumsum(np.concatenate(([self._clock.now], seconds)))[1:]
        self._plan = plan
        self._ask_for_end()

    def _ask_for_end(self) -> None:
        self._num_launches += 1
        launch = self._num_launches
        self._clock.at_step_end(float(self._ends[-1]), self.number, lambda: self._end(launch))

    def _cut_short(self) -> None:
        """Ends a run with the step that is under way."""
        last = int(np.searchsorted(self._ends, self._clock.now, side="right"))
        if last + 1 < len(self._ends):
            self._ends = self._ends[: last + 1]
            self._ask_for_end()

    def _num_alike(self, plan: StepPlan) -> int:
        """Steps that are bound to be like this one, which is the first: until a block is full or a
        sequence ends."""
        if not plan.is_pure_decode or plan.new_slots or plan.released or plan.external:
            return 1
        if plan.encoder != NO_ENCODER_STEP or self.scheduler.encode_jobs.has_work:
            return 1
        starts = plan.decode_starts
        limits = self.scheduler.batch_slots.length_limit[plan.decode_slots]
        to_full_block = self._block_size - starts % self._block_size
        return int(np.minimum(to_full_block, limits - starts - 1).min())

    def _end(self, launch: int) -> None:
        """Books what was launched, unless it was cut short since."""
        plan, ends = self._plan, self._ends
        if plan is None or launch != self._num_launches:
            return
        self._plan = None
        if len(ends) > 1:
            plan = self._skip(plan, len(ends) - 1)
        self.num_steps += len(ends)
        self._is_planning = True  # no callback may start a step
        result = StepResult(self._token_of[plan.sample_slots])
        self._report_progress(self.scheduler.apply(plan, result), ends)
        self._report_held(plan)
        self._next_step()

    def _skip(self, plan: StepPlan, num_steps: int) -> StepPlan:
        """Writes so many steps of a plan as if they had been applied; returns the one behind."""
        columns, batch_slots, starts = (
            self.scheduler.batch_slots,
            plan.decode_slots,
            plan.decode_starts,
        )
        places = starts[:, None] + np.arange(1, num_steps + 1)
        columns.token_ids[batch_slots[:, None], places] = self._token_of[batch_slots][:, None]
        columns.num_computed[batch_slots] += num_steps
        columns.num_tokens[batch_slots] += num_steps
        self.scheduler.count_computed(num_steps * len(batch_slots))
        return replace(plan, decode_starts=starts + num_steps)

    # What is told.

    def _report_progress(self, progress: StepProgress, ends: FloatArray) -> None:
        self._report_cache_events()
        if progress.decoded.sequences:
            jobs = [self.job(s.request.request_id) for s in progress.decoded.sequences]
            self._gaps.add(ends[0] - np.array([job.last_token_at for job in jobs]))
            if len(ends) > 1:
                self._gaps.add(ends[1:] - ends[:-1], len(jobs))
            for job in jobs:
                job.last_token_at = float(ends[-1])
                job.num_gaps += len(ends)
            for i in sorted(progress.decoded.reasons):
                self._watcher.on_finished(jobs[i])
        for other in progress.others:
            job = self.job(other.request.request_id)
            if job.prefilled_at is None:
                job.num_cached_tokens = other.num_cached_tokens
            self._watcher.on_computed(self, job, other.num_computed_tokens)
            if other.token_ids:
                self._watcher.on_token(self, job, other.finish_reason)

    def _report_held(self, plan: StepPlan) -> None:
        for held in plan.encoder.held:
            self._watcher.on_held(self, held)

    def note_token(self, job: Job, now: float) -> None:
        """Counts a token of a job that is not a plain decode's."""
        self._gaps.add(np.array([now - job.last_token_at]))
        job.last_token_at = now
        job.num_gaps += 1

    def _report_cache_events(self) -> None:
        events = self.scheduler.drain_events()
        if events:
            self._watcher.on_cache_events(self, events)


def _load_of(plan: StepPlan, num_steps: int) -> StepLoad:
    """Returns what each of `num_steps` steps like this one computes and reads."""
    num_decodes = len(plan.decode_slots)
    num_read = int((plan.decode_starts + 1).sum())
    chunks = [(chunk.start, chunk.end) for chunk in plan.chunks]
    num_pairs = num_read + sum((end - start) * (start + end + 1) // 2 for start, end in chunks)
    num_read += sum(end for _, end in chunks)
    grown: FloatArray = np.arange(num_steps, dtype=np.float64) * num_decodes
    return StepLoad(
        plan.num_tokens,
        num_decodes + len(chunks),
        num_pairs + grown,
        num_read + grown,
        sum(output.encoder_input.length for output in plan.encoder.to_compute),
    )
