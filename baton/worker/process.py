"""Worker process: a worker with the installed roles, put together from its settings, and run."""

import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from baton.engine.core.process.engine_child import EngineChild
from baton.rpc.worker_role import Role
from baton.serving import process
from baton.v1 import admin_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.memory import bound_primitive_caches, keep_freed_memory
from baton.worker.metrics import WorkerMetrics
from baton.worker.model_host import child_for
from baton.worker.roles import roles, settings_class
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker

logger = logging.getLogger(__name__)

# The engine's thread needs the interpreter some hundred times a step. At Python's 5 ms it would
# stall whenever another thread has it, such as one that sends a step's tokens; shorter still costs
# more than it gains.
SWITCH_INTERVAL = 0.0005


def assemble(role: Role, settings: WorkerSettings, child: EngineChild | None = None) -> Worker:
    """Returns a worker that begins in `role` and does not run yet. `child`: the process for its
    engine; None: a thread."""
    worker = Worker(role, settings, child)
    worker.server.exposition.add(WorkerMetrics(worker.model, worker.membership))
    admin = WorkerAdmin(worker)  # type: ignore[abstract] # the rest is the router's
    worker.server.main.add_admin(admin_pb2_grpc.add_AdminServicer_to_server, admin)
    for each in roles():
        import_module(each.module).add_role(worker)
    return worker


def main(role: Role, arguments: Sequence[str], program: str) -> None:
    """Runs a worker until a signal. `arguments` follow `program` on the command line."""
    child: EngineChild | None = None

    def prepare(settings: WorkerSettings) -> None:
        nonlocal child
        # A child for the engine inherits all of it.
        sys.setswitchinterval(SWITCH_INTERVAL)
        keep_freed_memory()
        bound_primitive_caches()
        child = child_for(settings)

    async def serve(settings: WorkerSettings) -> None:
        worker = assemble(role, settings, child)
        await worker.run()
        if worker.model.is_loading:
            logger.info("ended while the model was being loaded")
            os._exit(0)  # an interpreter that ends waits for its threads, here for the whole model

    process.main(
        settings_class(), role, serve, prepare=prepare, arguments=arguments, program=program
    )
