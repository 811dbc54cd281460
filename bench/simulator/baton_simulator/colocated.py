"""Workers that do both: a prompt is computed where its answer is written."""

from collections.abc import Sequence

from baton.engine.request import FinishReason, KvSource, Purpose
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.placement import Placement
from baton_simulator.cluster import ROLES, Cluster, Flight, SimulatedWorker
from baton_simulator.engine import SimulatedEngine
from baton_simulator.job import Job
from baton_simulator.setup import Setup


class Colocated(Cluster):
    """Colocated workers: the reference of disaggregation, on as many machines. A worker is placed
    on as a prefill and a decode worker that pair with each other alone and hand nothing over, so
    that the policies are the same."""

    has_roles = False

    def __init__(self, setup: Setup, jobs: Sequence[Job]) -> None:
        super().__init__(setup, jobs)
        for i in range(setup.num_workers):
            self.add_worker(f"worker-{i}")

    @property
    def computing(self) -> Sequence[SimulatedWorker]:
        return self.workers

    def candidates(self, cached: dict[str, int]) -> list[Candidate]:
        room = self.setup.max_len
        return [
            self.view(
                worker,
                role,
                worker.name.encode(),
                cached.get(worker.name, 0) if role == "prefill" else room,
            )
            for worker in self.workers
            for role in ROLES
        ]

    def pair(self, placement: Placement) -> tuple[SimulatedWorker, SimulatedWorker]:
        worker = self.worker(placement.prefill)
        return worker, worker

    def dispatch(self, flight: Flight) -> None:
        job = flight.job
        flight.prefill.engine.add(job, job.request(Purpose.GENERATE, KvSource.LOCAL))

    def on_token(self, engine: SimulatedEngine, job: Job, reason: FinishReason | None) -> None:
        self.note_local_token(engine, self.flights[job.number], reason)
