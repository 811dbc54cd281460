"""Encode and prefill roles of a worker, registered under the entry points `baton.roles`."""

from baton.worker.roles import WorkerRole
from baton.worker.settings import WorkerSettings

ENCODE = WorkerRole(WorkerSettings, "baton_prefill_worker.encode_service")
PREFILL = WorkerRole(WorkerSettings, "baton_prefill_worker.service")
