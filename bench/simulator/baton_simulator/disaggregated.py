"""Prefill and decode workers apart: a prompt is computed here and handed over there."""

from collections.abc import Sequence

from baton.engine.request import FinishReason, KvSource, Purpose
from baton.rpc.worker_role import Role
from baton_kvtransfer.lease.reclaim import POLL_INTERVAL
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.placement import Placement
from baton_simulator.cluster import Cluster, Flight, SimulatedWorker
from baton_simulator.engine import SimulatedEngine
from baton_simulator.job import Job
from baton_simulator.latency import transfer_end
from baton_simulator.setup import Setup

_PAIRING = b"alike"


class Disaggregated(Cluster):
    """Disaggregated cluster, as router and workers serve it: the decode worker promises room and
    waits for blocks; the prefill worker computes them and keeps them until those that the decode
    worker lacks have moved, chunk by chunk. A finished prompt that cannot be fetched yet is
    reclaimed if sequences on both sides wait for its blocks."""

    def __init__(self, setup: Setup, jobs: Sequence[Job]) -> None:
        super().__init__(setup, jobs)
        self._prefills = [self.add_worker(f"prefill-{i}") for i in range(setup.num_prefill)]
        self._decodes = [self.add_worker(f"decode-{i}") for i in range(setup.num_decode)]
        self._encoders = [self.add_worker(f"encode-{i}") for i in range(setup.num_encode)]
        self._pools: dict[Role, list[SimulatedWorker]] = {
            "encode": self._encoders,
            "prefill": self._prefills,
            "decode": self._decodes,
        }
        self._kept: dict[int, dict[int, Flight]] = {w.engine.number: {} for w in self._prefills}

    @property
    def computing(self) -> Sequence[SimulatedWorker]:
        return self._prefills

    def candidates(self, cached: dict[str, int]) -> list[Candidate]:
        return [
            self.view(worker, role, _PAIRING, cached.get(worker.name, 0))
            for role, workers in self._pools.items()
            for worker in workers
        ]

    def pair(self, placement: Placement) -> tuple[SimulatedWorker, SimulatedWorker]:
        decode = self.worker(placement.decode)
        return self.worker(placement.prefill) if placement.prefill else decode, decode

    def dispatch(self, flight: Flight) -> None:
        job = flight.job
        if flight.is_alone:
            flight.decode.engine.add(job, job.request(Purpose.GENERATE, KvSource.LOCAL))
            return
        flight.decode.engine.add(job, job.request(Purpose.GENERATE, KvSource.EXTERNAL))
        self._compute(flight)

    def _compute(self, flight: Flight) -> None:
        job = flight.job
        job.chunks.clear()
        flight.prefill.engine.add(job, job.request(Purpose.PREFILL, KvSource.LOCAL))

    def on_computed(self, engine: SimulatedEngine, job: Job, num_tokens: int) -> None:
        flight = self.flights[job.number]
        if engine is flight.prefill.engine:
            job.chunks.append((self.clock.now, num_tokens))

    def on_token(self, engine: SimulatedEngine, job: Job, reason: FinishReason | None) -> None:
        flight = self.flights[job.number]
        if flight.is_alone or engine is not flight.prefill.engine:
            self.note_local_token(engine, flight, reason)
            return
        self.note_first_token(flight)
        flight.is_computed = True
        if job.num_output_tokens == 1:
            self._abandon(flight)
        elif flight.claim is not None:
            self._hand_over(flight, flight.claim)
        else:
            self._kept[engine.number][job.number] = flight

    def on_claimed(self, job: Job, num_held_tokens: int) -> None:
        flight = self.flights[job.number]
        flight.claim = (self.clock.now, num_held_tokens)
        if flight.is_retracted:
            flight.is_retracted = False
            self._compute(flight)
        elif flight.is_computed:
            del self._kept[flight.prefill.engine.number][job.number]
            self._hand_over(flight, flight.claim)

    def _hand_over(self, flight: Flight, claim: tuple[float, int]) -> None:
        network = self.setup.machine.network
        end = transfer_end(flight.job.chunks, *claim, network)
        self.clock.at(max(end, self.clock.now), lambda: self._commit(flight))

    def _commit(self, flight: Flight) -> None:
        request_id, token_id = flight.job.request_id, flight.job.token_id
        flight.prefill.engine.submit(lambda s: s.release(request_id))
        flight.decode.engine.submit(lambda s: s.commit_external(request_id, token_id))

    def _abandon(self, flight: Flight) -> None:
        """Its first token was all that was asked for."""
        request_id = flight.job.request_id
        for worker in (flight.prefill, flight.decode):
            worker.engine.submit(lambda s: s.abort(request_id))
        self.end(flight)

    # Deadlock of both pools.

    def on_stalled(self, engine: SimulatedEngine) -> None:
        if self._kept.get(engine.number):
            self.clock.at(self.clock.now + POLL_INTERVAL, lambda: self._reclaim_lease(engine))

    def _reclaim_lease(self, engine: SimulatedEngine) -> None:
        """Reclaims the prompt that was kept longest, if a waiting sequence needs its blocks."""
        kept, stats = self._kept[engine.number], engine.scheduler.stats()
        is_awaited = any(
            flight.prefill.engine is engine and flight.claim and not flight.is_computed
            for flight in self.flights.values()
        )
        if not kept or not is_awaited or stats.num_running or not stats.num_waiting:
            return
        flight = kept.pop(next(iter(kept)))
        flight.is_retracted, flight.is_computed = True, False
        request_id = flight.job.request_id
        engine.submit(lambda s: s.release(request_id))
