"""Roles of a worker, found by the entry points `baton.roles` of the installed packages.

Every worker serves all roles on one engine; each role refuses requests while the worker is in
another one. The role that a process is started with is only its first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from pydantic import create_model

from baton.cluster.registry import Role
from baton.serving import process
from baton.v1 import admin_pb2_grpc
from baton.worker.admin import WorkerAdmin
from baton.worker.metrics import WorkerMetrics
from baton.worker.settings import WorkerSettings
from baton.worker.worker import Worker

GROUP = "baton.roles"


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """Role of a worker: the object that an entry point names.

    Attributes:
        settings: the settings that the role reads.
        add: adds the role's services and metrics to a worker that does not run yet.
    """

    settings: type[WorkerSettings]
    add: Callable[[Worker], None]


@cache
def roles() -> tuple[WorkerRole, ...]:
    """Returns the installed roles, in the order of their names."""
    return tuple(point.load() for point in sorted(entry_points(group=GROUP)))


@cache
def settings_class() -> type[WorkerSettings]:
    """Returns the settings of a worker that may have any installed role."""
    named = list(dict.fromkeys(role.settings for role in roles()))
    bases = tuple(a for a in named if not any(issubclass(b, a) for b in named if b is not a))
    return create_model("RoleSettings", __doc__="Settings of a worker.", __base__=bases)


def assemble(role: Role, settings: WorkerSettings) -> Worker:
    """Returns a worker that begins in `role` and does not run yet."""
    worker = Worker(role, settings)
    worker.exposition.add(WorkerMetrics(worker))
    worker.server.add_admin(admin_pb2_grpc.add_AdminServicer_to_server, WorkerAdmin(worker))
    for each in roles():
        each.add(worker)
    return worker


def main(role: Role, arguments: Sequence[str], program: str) -> None:
    """Runs a worker until a signal. `arguments` follow `program` on the command line."""

    async def serve(settings: WorkerSettings) -> None:
        await assemble(role, settings).run()

    process.main(settings_class(), role, serve, arguments=arguments, program=program)
