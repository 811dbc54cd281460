"""Model that a worker has loaded, without an engine."""

from types import SimpleNamespace
from typing import Any

from baton.rpc.worker_role import Role
from baton.worker.membership import Membership
from baton.worker.model_host import ModelHost
from baton.worker.server import WorkerServer
from baton.worker.settings import WorkerSettings


class LoadedModel(ModelHost):
    """Host of a model that has no encoder; of its engine, tests see this alone."""

    info = SimpleNamespace(name="m", architecture="llama")
    engine: Any = SimpleNamespace(encoder_pool=None, facts=SimpleNamespace(info=info))


def membership_of(role: Role, **settings: Any) -> Membership:
    """Returns the membership of a worker `w` whose server does not listen."""
    given = WorkerSettings(worker_id="w", **settings)
    return Membership(role, given, WorkerServer(given))
