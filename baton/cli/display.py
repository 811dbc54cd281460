"""Start-up progress of a cluster: live on a terminal, one line per change elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from baton.cli.status import OnStatus, Status


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
    """Line-by-line output, a line whenever the phase of a process changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, str] = {}

    def __call__(self, statuses: list[Status]) -> None:
        for status in statuses:
            doing = _doing(status)
            if self._last.get(status.name) != doing:
                self._last[status.name] = doing
                self._console.print(f"{status.name}: {doing}", highlight=False)


def _doing(status: Status) -> str:
    return status.phase or status.state
