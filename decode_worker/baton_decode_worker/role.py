"""Decode role of a worker, registered under the entry point `baton.roles`."""

from baton.worker.roles import WorkerRole
from baton_decode_worker.settings import DecodeSettings

DECODE = WorkerRole(DecodeSettings, "baton_decode_worker.service")
