"""Start-up progress of a cluster: live on a terminal, one line per change elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from baton.cli.local.status import OnStatus, Status
from baton.cli.top.tables import in_bytes

_LINE_INTERVAL = 5.0  # seconds


@contextmanager
def status_display(console: Console) -> Iterator[OnStatus]:
    """Yields a callback for the statuses of all processes."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[doing]}", style="dim"),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)


class _Bars:
    """Progress bar for each process."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, statuses: list[Status]) -> None:
        for status in statuses:
            if status.name not in self._tasks:
                self._tasks[status.name] = self._progress.add_task(status.name, total=1.0, doing="")
            self._progress.update(
                self._tasks[status.name], completed=status.progress, doing=_doing(status)
            )


class _Lines:
    """Line-by-line output: a line whenever the phase of a process changes, and every 5 s while it
    loads weights."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, tuple[str, float]] = {}  # phase, and when it was printed

    def __call__(self, statuses: list[Status]) -> None:
        now = time.monotonic()
        for status in statuses:
            phase, printed_at = self._last.get(status.name, ("", now))
            is_due = status.is_loading and now - printed_at >= _LINE_INTERVAL
            if is_due or phase != (phase := status.phase or status.state):
                self._last[status.name] = phase, now
                self._console.print(f"{status.name}: {_doing(status)}", highlight=False)


def _doing(status: Status) -> str:
    """Returns the phase, and while weights are loaded the bytes and the time left: "loading weights
    3.1 of 15.2 GB, about 40 s left"."""
    phase = status.phase or status.state
    if not status.is_loading:
        return phase
    loaded, size = in_bytes(status.num_loaded_bytes), in_bytes(status.num_weight_bytes)
    unit = size.partition(" ")[2]
    doing = f"{phase} {loaded.removesuffix(f' {unit}')} of {size}"
    left = status.seconds_left
    return doing if left is None else f"{doing}, about {max(1, round(left))} s left"
