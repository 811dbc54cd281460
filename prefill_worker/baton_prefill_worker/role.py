"""Prefill role of a worker, registered under the entry point `baton.roles`."""

from baton.v1.prefill_pb2_grpc import add_PrefillServicer_to_server
from baton.worker.roles import WorkerRole
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker
from baton_prefill_worker.service import PrefillService


def _add(worker: Worker) -> None:
    worker.server.add(add_PrefillServicer_to_server, worker.component(PrefillService))


PREFILL = WorkerRole(WorkerSettings, _add)
