"""Decode role of a worker, registered under the entry point `baton.roles`."""

from baton.v1.decode_pb2_grpc import add_DecodeServicer_to_server
from baton.worker.roles import WorkerRole
from baton.worker.worker import Worker
from baton_decode_worker.service import DecodeService
from baton_decode_worker.settings import DecodeSettings


def _add(worker: Worker) -> None:
    service = worker.component(DecodeService)
    worker.server.add(add_DecodeServicer_to_server, service)
    worker.exposition.add(service)


DECODE = WorkerRole(DecodeSettings, _add)
