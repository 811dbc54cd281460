"""Clocks of a GPU while work runs, as nvidia-smi sees them: whether figures were taken at speed."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

_QUERY = "clocks.sm,utilization.gpu,power.draw,temperature.gpu,clocks_event_reasons.active"
_INTERVAL_MS = 500
# Bits of NVML: slowed by power cap, hardware, software's or hardware's thermal limit, power brake.
_SLOWED = 0x04 | 0x08 | 0x20 | 0x40 | 0x80


@contextmanager
def clocks() -> Iterator[dict[str, Any]]:
    """Samples the first visible GPU during the `with` block; afterwards the yielded dict has the
    `summary`, or nothing where nvidia-smi does not answer."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as log:
        process = _sampler(log)
        try:
            yield found
        finally:
            if process is not None:
                process.terminate()
                process.wait()
            log.seek(0)
            found.update(summary(log.read()))


def _sampler(log: IO[str]) -> "subprocess.Popen[str] | None":
    command = [
        "nvidia-smi",
        f"--query-gpu={_QUERY}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_INTERVAL_MS}",
        "--id=" + (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0],
    ]
    try:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def summary(samples: str) -> dict[str, Any]:
    """Returns SM clocks in MHz, the most watts and degrees, and the fraction of samples in which
    the GPU was slowed, over the lines of samples taken while it was busy. Empty if there is none.
    """
    busy = [row for row in map(_sample, samples.splitlines()) if row is not None and row[1] > 0]
    if not busy:
        return {}
    mhz, _, watts, celsius, reasons = zip(*busy, strict=True)
    return {
        "sm_mhz": [min(mhz), max(mhz)],
        "max_watts": max(watts),
        "max_celsius": max(celsius),
        "slowed": sum(bool(int(r) & _SLOWED) for r in reasons) / len(busy),
    }


def _sample(line: str) -> tuple[float, ...] | None:
    """Returns one sample's values; None for a line that is cut short or says what is not known."""
    *numbers, reasons = line.split(",")
    try:
        values = (*map(float, numbers), float(int(reasons, 16)))
    except ValueError:
        return None
    return values if len(values) == len(_QUERY.split(",")) else None
