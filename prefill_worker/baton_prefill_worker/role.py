"""Prefill role of a worker, registered under the entry point `baton.roles`."""

from baton.worker.roles import WorkerRole
from baton.worker.settings import WorkerSettings

PREFILL = WorkerRole(WorkerSettings, "baton_prefill_worker.service")
