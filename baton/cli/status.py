"""Start-up status of one process, read from its admin service."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.cli.process import Process
from baton.client.client import Client
from baton.errors import BatonError

ANSWER_TIMEOUT = 1.0  # seconds; a process that loads a model may not answer for a while


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a process: `state` as in `Client.get_load`, "starting" before it answers."""

    name: str
    state: str = "starting"
    phase: str = "starting"
    progress: float = 0.0

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"


OnStatus = Callable[[list[Status]], None]


def status_of(process: Process, last: Status) -> Status:
    """Returns the status of a process, by its admin service; the `last` one if it does not answer,
    as while it loads a model."""
    try:
        with Client(process.admin_endpoint, timeout=ANSWER_TIMEOUT, tls=process.tls) as client:
            load = client.get_load()
    except BatonError:
        return last
    return Status(process.name, load.state, load.phase, load.progress)
