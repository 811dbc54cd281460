"""Simulated cluster: workers, the router's index and counts, and arrivals.

The router is its own code: the index, the counts of load, its gate, the policies, the choice among
them, and what it does when a worker refuses. Cache events reach it at once, and from every worker.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.context_length import ContextLength
from baton.engine.request import FinishReason
from baton.engine.scheduler.kv.encoder_cache import HeldOutput
from baton.engine.scheduler.sequences.encoder_inputs import check_encoder_inputs
from baton.errors import BatonError, OverloadedError
from baton.rpc.worker_role import Role
from baton_decode_worker.capacity import Capacity, num_blocks_on_arrival
from baton_router.call.failure import AttemptFailure, FailureKind
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.routing.fleet.candidate import Candidate, WorkerLimits
from baton_router.routing.fleet.decayed_counter import coarse
from baton_router.routing.fleet.load import Load, Share
from baton_router.routing.fleet.pending_prefixes import PendingPrefixes, held_blocks
from baton_router.routing.placement.decision import Decision, PlacementInputs, Rules
from baton_router.routing.placement.encoder_sources import EncoderChoice
from baton_router.routing.placement.placement import Placement
from baton_simulator.admission import AdmissionController
from baton_simulator.clock import Clock
from baton_simulator.encoder_transfer import EncoderTransfers
from baton_simulator.engine import SimulatedEngine
from baton_simulator.gaps import Gaps
from baton_simulator.job import Job
from baton_simulator.rates import rates_of
from baton_simulator.setup import Setup

OnProgress = Callable[[int, int, float], None]
"""Told how many requests have ended, of how many, and the simulated seconds."""

ROLES: tuple[Role, ...] = ("prefill", "decode")

_LEAST_INDEXED = 1_000_000  # what a router's index holds


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """One worker, and what the router counts of it.

    Attributes:
        num_computed_tokens: of prompts whose first token has come.
        seen: as placement sees it in a role, with nothing cached, until something changes.
    """

    name: str
    engine: SimulatedEngine
    capacity: Capacity
    load: Load = field(default_factory=Load)
    num_computed_tokens: int = 0
    seen: dict[Role, Candidate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """The load at one moment: prompt tokens of jobs that were let in and whose prompts are not
    computed yet, and of those that decode."""

    time: float
    num_prefill_tokens: int
    num_decode_tokens: int


@dataclass(slots=True, eq=False)
class Flight:
    """A job that was placed and has not ended. `stack` gives back what it holds of the counts, and
    `prefill_stack`, which is closed first, what is over with its first token. `fetched` are the
    encoder outputs that come from other workers; the stack of each gives back what it holds of the
    source's counts."""

    job: Job
    prefill: SimulatedWorker
    decode: SimulatedWorker
    stack: ExitStack = field(default_factory=ExitStack)
    prefill_stack: ExitStack = field(default_factory=ExitStack)
    fetched: list[tuple[EncoderChoice, ExitStack]] = field(default_factory=list)
    claim: tuple[float, int] | None = None
    is_retracted: bool = False
    is_computed: bool = False

    @property
    def is_alone(self) -> bool:
        """One worker does both."""
        return self.prefill is self.decode


class Cluster:
    """Jobs in, each of them ended or refused. Subclasses say what a worker does.

    Attributes:
        has_roles: a decode worker may be placed on alone, to compute a prompt itself.
    """

    has_roles = True

    def __init__(self, setup: Setup, jobs: Sequence[Job]) -> None:
        self.setup = setup
        self.jobs = jobs
        self.clock = Clock()
        self.gaps = Gaps()
        self.workers: list[SimulatedWorker] = []
        self.flights: dict[int, Flight] = {}
        self._by_engine: dict[int, SimulatedWorker] = {}
        self._by_name: dict[str, SimulatedWorker] = {}
        self._index = LocalityIndex(max(_LEAST_INDEXED, setup.num_workers * setup.num_blocks))
        self._pending = PendingPrefixes()
        self._encoder_transfers = EncoderTransfers(self.clock, setup.machine.network)
        self._rules = Rules(setup.policy, conditional_disaggregation=self.has_roles)
        self.rates = rates_of(setup.machine)
        self._budget = RetryBudget(clock=lambda: self.clock.now)
        self._admission = AdmissionController(
            setup, self.clock, self._decide, self._place, self._refuse
        )
        self.samples: list[Sample] = []
        self._num_placed = 0
        self._moment = 0.0
        self._decided: dict[tuple[int, frozenset[str]], Decision] = {}
        self._room = setup.max_len
        self._limits = WorkerLimits(
            setup.max_len, setup.block_size, setup.num_blocks, setup.machine.max_num_seqs
        )
        self._num_ended = 0
        self._on_progress: OnProgress = lambda _done, _total, _now: None
        longest = max((job.num_prompt_tokens + job.num_output_tokens for job in jobs), default=1)
        self._config = setup.scheduler_config(min(longest, setup.max_len))

    def run(self, on_progress: OnProgress) -> None:
        """Until every job has ended or was refused."""
        self._on_progress = on_progress
        if self.jobs:
            self._await_arrival(0)
            self._sample()
        self.clock.run()
        assert not self.flights, f"{len(self.flights)} requests got stuck"

    # For subclasses.

    def add_worker(self, name: str) -> SimulatedWorker:
        setup = self.setup
        engine = SimulatedEngine(
            len(self.workers),
            self._config,
            setup.num_blocks,
            setup.machine.steps,
            self.clock,
            self,
            self.gaps,
            fast_forward=setup.fast_forward,
        )
        capacity = Capacity(int(setup.num_blocks * setup.admit_factor))
        worker = SimulatedWorker(name, engine, capacity)
        self.workers.append(worker)
        self._by_engine[engine.number] = worker
        self._by_name[name] = worker
        return worker

    @property
    def computing(self) -> Sequence[SimulatedWorker]:
        """The workers that compute prompts."""
        raise NotImplementedError

    def candidates(self, cached: dict[str, int]) -> list[Candidate]:
        """The router's snapshot; `cached` are leading tokens by worker."""
        raise NotImplementedError

    def pair(self, placement: Placement) -> tuple[SimulatedWorker, SimulatedWorker]:
        raise NotImplementedError

    def worker(self, name: str) -> SimulatedWorker:
        return self._by_name[name]

    def dispatch(self, flight: Flight) -> None:
        """The workers have admitted a job, and their engines get it."""
        raise NotImplementedError

    def end(self, flight: Flight) -> None:
        """The job has all its tokens."""
        flight.job.is_finished = True
        flight.prefill_stack.close()
        flight.stack.close()
        del self.flights[flight.job.number]
        self._admission.end(flight.job)
        self._count_end()

    def note_first_token(self, flight: Flight) -> None:
        """Its prompt is computed."""
        job, now = flight.job, self.clock.now
        if job.prefilled_at is None:
            job.prefilled_at = job.last_token_at = now
            flight.prefill.num_computed_tokens += job.num_prompt_tokens - job.num_cached_tokens
        flight.prefill_stack.close()

    def note_local_token(
        self, engine: SimulatedEngine, flight: Flight, reason: FinishReason | None
    ) -> None:
        """A token of a prompt that is computed where its answer is written: the first one, or one
        behind a preemption."""
        if flight.job.prefilled_at is None:
            self.note_first_token(flight)
        else:
            engine.note_token(flight.job, self.clock.now)
        if reason is not None:
            self.end(flight)

    def count(self, stack: ExitStack, worker: SimulatedWorker, share: Share) -> None:
        """Counts a share of load until the stack is closed."""
        worker.load.take(share, self.clock.now, self._num_placed)
        self._note_change(worker)
        stack.callback(self._release_share, worker, share)

    def view(self, worker: SimulatedWorker, role: Role, pairing: bytes, cached: int) -> Candidate:
        """The worker as the router sees it, with so many tokens cached."""
        seen = worker.seen.get(role)
        if seen is None:
            seen = worker.seen[role] = worker.load.candidate(
                worker.name,
                role,
                pairing,
                self._moment,
                num_cached_tokens=0,
                max_held_tokens=self._room,
                rates=self.rates,
                limits=self._limits,
            )
        return seen._replace(num_cached_tokens=cached) if cached else seen

    def _release_share(self, worker: SimulatedWorker, share: Share) -> None:
        worker.load.release(share)
        self._note_change(worker)

    def _note_change(self, worker: SimulatedWorker) -> None:
        worker.seen.clear()
        self._decided.clear()

    # Arrivals.

    def _await_arrival(self, number: int) -> None:
        self.clock.at(self.jobs[number].arrival, lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self.jobs):
            self._await_arrival(number + 1)
        job, machine = self.jobs[number], self.setup.machine
        self._budget.deposit()
        try:
            longest = ContextLength(self.setup.max_len)
            longest.check(job.num_prompt_tokens, job.num_output_tokens)
            check_encoder_inputs(
                job.encoder_inputs,
                job.num_prompt_tokens,
                machine.encoder_cache_tokens,
                machine.encoder_budget,
            )
            self._admission.arrive(job)
        except BatonError as error:
            self._refuse(job, error)

    def _place(self, job: Job) -> None:
        """Places a job that was admitted."""
        try:
            flight = self._admit(job)
        except BatonError as error:
            self._admission.end(job)
            self._refuse(job, error)
            return
        self.flights[job.number] = flight
        arrival = self.clock.now + self.setup.machine.network.per_request
        self.clock.at(arrival, lambda: self._dispatch(flight))

    def _dispatch(self, flight: Flight) -> None:
        claimant = flight.prefill.engine
        for choice, stack in flight.fetched:
            source = self.worker(choice.worker).engine
            encoder_input = flight.job.encoder_inputs[choice.input]
            self._encoder_transfers.begin(
                source, claimant, encoder_input, stack.close, only_cached=choice.only_cached
            )
        self.dispatch(flight)

    def _refuse(self, job: Job, error: BatonError) -> None:
        job.refusal = str(error)
        self._count_end()

    def _decide(self, job: Job, refused: Collection[str] = ()) -> Decision:
        """Returns the placement decision for a job now, without the `refused` workers. It is made
        once per state of the cluster."""
        self._refresh_views()
        key = job.number, frozenset(refused)
        if key not in self._decided:
            self._decided[key] = self._redecide(job, refused)
        return self._decided[key]

    def _redecide(self, job: Job, refused: Collection[str]) -> Decision:
        block_size = self.setup.block_size
        matches = held_blocks(self._index, self._pending, job.hashes)
        cached = {worker: num_blocks * block_size for worker, num_blocks in matches.items()}
        inputs_of = self._cached_inputs(job)
        candidates = tuple(
            c._replace(cached_inputs=tuple(inputs_of[c.worker])) if c.worker in inputs_of else c
            for c in self.candidates(cached)
            if c.worker not in refused
        )
        inputs = PlacementInputs(
            job.request_id,
            job.num_prompt_tokens,
            candidates,
            images=tuple(i.hashed for i in job.encoder_inputs),
            demand=job.demand,
        )
        return Decision(self._rules, inputs, self._rules.decide(inputs))

    def _cached_inputs(self, job: Job) -> dict[str, list[int]]:
        """Returns the indices of the encoder inputs whose output each worker has cached."""
        inputs_of: dict[str, list[int]] = {}
        for i, encoder_input in enumerate(job.encoder_inputs):
            for worker in self._index.match((encoder_input.content_hash,)):
                inputs_of.setdefault(worker, []).append(i)
        return inputs_of

    def _refresh_views(self) -> None:
        """Drops cached views of workers once their decayed counters have changed."""
        moment = coarse(self.clock.now)
        if moment != self._moment:
            self._moment = moment
            for worker in self.workers:
                self._note_change(worker)

    def _admit(self, job: Job) -> Flight:
        """Places a job; who refuses is passed over. Raises what refuses it for good."""
        recovery = Recovery(job.request_id, self._budget)
        while True:
            decision = self._decide(job, recovery.refused)
            placement = decision.placement
            if placement is None:
                recovery.after(AttemptFailure(FailureKind.NO_WORKER, decision.refusal), 0)
                continue
            try:
                return self._take(job, placement)
            except OverloadedError as error:
                pair = (placement.prefill, placement.decode)
                refused = AttemptFailure(FailureKind.REFUSED, error, placement.decode, pair)
                recovery.after(refused, 0)

    def _take(self, job: Job, placement: Placement) -> Flight:
        """The workers admit a job, and the router counts it. Raises `OverloadedError`."""
        prefill, decode = self.pair(placement)
        flight = Flight(job, prefill, decode)
        num_tokens, block_size = job.num_prompt_tokens, self.setup.block_size
        promise = decode.capacity.promise(num_blocks_on_arrival(num_tokens, [0], block_size))
        flight.stack.enter_context(promise)
        self._num_placed += 1
        num_uncached = max(0, num_tokens - placement.num_cached_tokens)
        pending = self._pending.pending(prefill.name, job.hashes)
        flight.prefill_stack.enter_context(pending)
        num_sequences = int(prefill is not decode)
        num_encoder_tokens = sum(c.num_tokens for c in placement.encoders if not c.worker)
        share = Share(num_sequences, num_uncached, num_encoder_tokens=num_encoder_tokens)
        self.count(flight.prefill_stack, prefill, share)
        self.count(flight.stack, decode, Share(num_held_tokens=num_tokens))
        for choice in placement.encoders:
            if choice.worker:
                flight.fetched.append((choice, self._counted(choice)))
        return flight

    def _counted(self, choice: EncoderChoice) -> ExitStack:
        """Counts what a source has to encode, until the stack is closed."""
        stack = ExitStack()
        if not choice.only_cached:
            share = Share(num_encoder_tokens=choice.num_tokens)
            self.count(stack, self.worker(choice.worker), share)
        return stack

    def _sample(self) -> None:
        every, num_tokens = self.setup.sample_seconds, [0, 0]
        if every is None or self._num_ended == len(self.jobs):
            return
        for flight in self.flights.values():
            num_tokens[flight.job.prefilled_at is not None] += flight.job.num_prompt_tokens
        self.samples.append(Sample(self.clock.now, *num_tokens))
        self.clock.at(self.clock.now + every, self._sample)

    def _count_end(self) -> None:
        self._num_ended += 1
        self._on_progress(self._num_ended, len(self.jobs), self.clock.now)

    # What engines tell.

    def on_cache_events(self, engine: SimulatedEngine, events: KvEvents) -> None:
        told = KvEvents(events.stored, events.removed, events.cleared)
        self._index.apply(self._by_engine[engine.number].name, 1, told)
        self._decided.clear()

    def on_claimed(self, job: Job, num_held_tokens: int) -> None:
        pass

    def on_computed(self, engine: SimulatedEngine, job: Job, num_tokens: int) -> None:
        pass

    def on_token(self, engine: SimulatedEngine, job: Job, reason: FinishReason | None) -> None:
        raise NotImplementedError

    def on_held(self, engine: SimulatedEngine, held: HeldOutput) -> None:
        self._encoder_transfers.on_held(engine, held)

    def on_finished(self, job: Job) -> None:
        self.end(self.flights[job.number])

    def on_stalled(self, engine: SimulatedEngine) -> None:
        pass
