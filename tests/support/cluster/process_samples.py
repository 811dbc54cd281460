"""Memory, descriptors and threads of processes over time, and charts of them."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
from matplotlib.figure import Figure

_MIB = 2**20
MEASURES: dict[str, Callable[[psutil.Process], float]] = {
    "RSS, MiB": lambda process: process.memory_info().rss / _MIB,
    "descriptors": lambda process: process.num_fds(),
    "threads": lambda process: process.num_threads(),
}


class Samples:
    """Samples of each measure of each process, as pairs of minutes since the first and a value.

    A process that was restarted under its name continues its series.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._series: dict[str, dict[str, list[tuple[float, float]]]] = {m: {} for m in MEASURES}

    def add(self, pids: Mapping[str, int]) -> None:
        """Samples the processes, by name; one that has ended is left out."""
        minutes = (time.monotonic() - self._began) / 60
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                for measure, value_of in MEASURES.items():
                    points = self._series[measure].setdefault(name, [])
                    points.append((minutes, value_of(process)))

    def summary(self) -> dict[str, str]:
        """Returns a line for each measure: the medians of the second tenth of the time and of the
        last one, by process."""
        return {
            measure: ", ".join(
                f"{name} {_median(points, 0.1, 0.2):.0f} to {_median(points, 0.9, 1.0):.0f}"
                for name, points in sorted(series.items())
            )
            for measure, series in self._series.items()
        }

    def write_charts(self, path: Path) -> None:
        """Writes a picture (SVG) with a chart for each measure."""
        figure = Figure(figsize=(12, 5 * len(MEASURES)), layout="constrained")
        for axes, (measure, series) in zip(
            figure.subplots(len(MEASURES)), self._series.items(), strict=True
        ):
            axes.set(title=measure, xlabel="minutes")
            for name, points in sorted(series.items()):
                axes.plot(*zip(*points, strict=True), label=name)
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg")


def _median(points: list[tuple[float, float]], start: float, end: float) -> float:
    """Returns the median of the values between two fractions of the time, at least one."""
    lasted = points[-1][0]
    values = sorted(v for t, v in points if start * lasted <= t <= end * lasted)
    return values[len(values) // 2] if values else points[-1][1]
