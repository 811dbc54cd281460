"""A worker that may have either role: the services of both on one engine, each of which refuses
work while the worker is in the other role. What `python -m prefill_worker` and `python -m
decode_worker` run; they differ in the role that the worker begins with.
"""

from typing import NamedTuple

from baton.cluster.registry import Role
from baton.serving import process
from baton.v1 import admin_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.exchange import KvExchange
from baton.worker.metrics import WorkerMetrics
from baton.worker.worker import Worker
from decode_worker.service import DecodeService, add_decode
from decode_worker.settings import DecodeSettings
from prefill_worker.service import add_prefill


class RoleSettings(DecodeSettings):
    """Settings of a worker, in whichever role it is."""


class AssembledWorker(NamedTuple):
    """A worker that is yet to run, and what it has for other workers."""

    worker: Worker
    exchange: KvExchange
    decode: DecodeService


def assemble(role: Role, settings: RoleSettings) -> AssembledWorker:
    """A worker that is yet to run, and begins in `role`."""
    worker = Worker(role, settings)
    exchange = KvExchange(worker)
    add_prefill(worker, exchange)
    decode = add_decode(worker, exchange, settings.admit_factor)
    worker.exposition.add(WorkerMetrics(worker, exchange, decode))
    admin = WorkerAdmin(worker, exchange, decode)
    worker.server.add_admin(admin_pb2_grpc.add_AdminServicer_to_server, admin)
    return AssembledWorker(worker, exchange, decode)


def main(role: Role) -> None:
    """Serves until a signal."""

    async def serve(settings: RoleSettings) -> None:
        await assemble(role, settings).worker.run()

    process.main(RoleSettings, role, serve)
