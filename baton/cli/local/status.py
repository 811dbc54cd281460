"""Start-up status of one process, read from its admin service."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.cli.local.process import Process
from baton.client.client import Client
from baton.errors import BatonError

ANSWER_TIMEOUT = 1.0  # seconds; a process that loads a model may not answer for a while


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a process.

    Attributes:
        state: as in `Client.get_load`, "starting" before it answers.
        num_loaded_bytes, num_weight_bytes: of a worker's weights, while they are downloaded and
            while they are loaded; 0 before.
        seconds_left: until all are here at the rate so far; None: unknown.
    """

    name: str
    state: str = "starting"
    phase: str = "starting"
    progress: float = 0.0
    num_loaded_bytes: int = 0
    num_weight_bytes: int = 0
    seconds_left: float | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_loading(self) -> bool:
        """Whether it downloads or loads weights now."""
        return 0 < self.num_loaded_bytes < self.num_weight_bytes


OnStatus = Callable[[list[Status]], None]


class LoadingTimes:
    """Time that processes need to download and to load weights, from the bytes that they report."""

    def __init__(self) -> None:
        # Moment and bytes, by process and phase.
        self._first: dict[tuple[str, str], tuple[float, int]] = {}

    def seconds_left(self, status: Status, now: float) -> float | None:
        """Returns the seconds to the end of the phase, at the rate since its first report; None
        while there is no rate. `now`: monotonic seconds."""
        if not status.is_loading:
            return None
        began, before = self._first.setdefault(
            (status.name, status.phase), (now, status.num_loaded_bytes)
        )
        rate = (status.num_loaded_bytes - before) / (now - began) if now > began else 0.0
        return (status.num_weight_bytes - status.num_loaded_bytes) / rate if rate else None


def status_of(process: Process, last: Status) -> Status:
    """Returns the status of a process, by its admin service; the `last` one if it does not answer,
    as while it loads a model."""
    try:
        with Client(process.admin_endpoint, timeout=ANSWER_TIMEOUT, tls=process.tls) as client:
            load = client.get_load()
    except BatonError:
        return last
    return Status(
        process.name,
        load.state,
        load.phase,
        load.progress,
        load.num_loaded_bytes,
        load.num_weight_bytes,
    )
