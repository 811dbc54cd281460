"""Roles of a worker, found by the entry points `baton.roles` of the installed packages.

Every worker serves all roles on one engine; each role refuses requests while the worker is in
another one. The role that a process is started with is only its first.

Imports no torch: `baton up` reads the settings of workers here before it starts any.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from pydantic import create_model

from baton.worker.settings import WorkerSettings

GROUP = "baton.roles"


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """Role of a worker: the object that an entry point names.

    Attributes:
        settings: the settings that the role reads.
        module: its service; the module's function `add_role(worker)` adds services and metrics to a
            worker that does not run yet.
    """

    settings: type[WorkerSettings]
    module: str


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


def modules() -> list[str]:
    """Returns the modules that a worker imports, torch among what they import, and what makes its
    model load faster."""
    own = ["baton.worker.process", *(role.module for role in roles())]
    return [*own, "baton.engine.executor.models.preload"]
