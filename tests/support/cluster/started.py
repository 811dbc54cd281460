"""Start of a process beside a cluster, on ports that other tests' processes may take meanwhile."""

from collections.abc import Callable
from pathlib import Path

from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from tests.support.waiting import wait_until

_WITHIN = 60.0


def start(process: Process, folder: Path, is_ready: Callable[[], bool]) -> None:
    """Starts a process with its log in `folder`, on another port for each that was taken before it
    listened, and waits until `is_ready()`."""

    def settled() -> bool:
        lost = process.lost_port
        if lost is None:
            return is_ready()
        process.move(lost, free_port({lost}))
        process.start(folder)
        return False

    process.start(folder)
    wait_until(settled, within=_WITHIN, what=f"a ready {process.name}")
