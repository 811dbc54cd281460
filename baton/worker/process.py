"""Worker process: a worker with the installed roles, put together from its settings, and run."""

import logging
import os
from collections.abc import Sequence

from baton.cluster.registry import Role
from baton.engine.process.engine_child import EngineChild
from baton.serving import process
from baton.v1 import admin_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.engine_process import child_for
from baton.worker.metrics import WorkerMetrics
from baton.worker.roles import roles, settings_class
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker

logger = logging.getLogger(__name__)


def assemble(role: Role, settings: WorkerSettings, child: EngineChild | None = None) -> Worker:
    """Returns a worker that begins in `role` and does not run yet. `child`: the process for its
    engine; None: a thread."""
    worker = Worker(role, settings, child)
    worker.exposition.add(WorkerMetrics(worker))
    worker.server.add_admin(admin_pb2_grpc.add_AdminServicer_to_server, WorkerAdmin(worker))
    for each in roles():
        each.add_to(worker)
    return worker


def main(role: Role, arguments: Sequence[str], program: str) -> None:
    """Runs a worker until a signal. `arguments` follow `program` on the command line."""
    child: EngineChild | None = None

    def prepare(settings: WorkerSettings) -> None:
        nonlocal child
        child = child_for(settings)

    async def serve(settings: WorkerSettings) -> None:
        worker = assemble(role, settings, child)
        await worker.run()
        if worker.is_loading:
            logger.info("ended while the model was being loaded")
            os._exit(0)  # an interpreter that ends waits for its threads, here for the whole model

    process.main(
        settings_class(), role, serve, prepare=prepare, arguments=arguments, program=program
    )
