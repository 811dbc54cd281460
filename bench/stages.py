"""Stages of a long run: commands with budgets, each in processes of its own. Knows no GPU.

A stage that exceeds its budget has failed and is ended, with every process that it started. What it
finds out it writes to files as it goes, which are read however it ends; its output is a log.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3.0
"""Time in which a stage that is interrupted may write its report, and in which what it started has
to be gone after it was killed."""

BUDGET_VARIABLE = "BATON_STAGE_SECONDS"
"""Environment variable that tells a command its budget."""

_POLL_SECONDS = 0.02
_MAX_OUTPUT = 60_000  # characters of a failed stage's log in its result


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a stage.

    Attributes:
        figures: what to report.
        failures: reasons for which it fails although its command may have succeeded.
        notes: what it has left out, and why; no failures.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage of a run.

    Attributes:
        name: name in the report.
        command: program and arguments.
        budget: seconds within which the command has to end.
        read: returns the findings after the command has ended, in any way.
        environment: variables besides those of this process.
    """

    name: str
    command: tuple[str, ...]
    budget: float
    read: Callable[[], Findings]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of a stage, which passed if it has no `failures`. `output`: the end of its log if it
    failed."""

    name: str
    seconds: float
    budget: float
    figures: dict[str, Any]
    failures: tuple[str, ...]
    notes: tuple[str, ...] = ()
    output: str = ""


def run_stage(stage: Stage, log: Path, grace: float = GRACE_SECONDS) -> StageResult:
    """Runs a stage to its end, at most twice `grace` seconds longer than its budget. Its output
    replaces what `log` has."""
    start = time.monotonic()
    failures: list[str] = []
    environment = {**os.environ, BUDGET_VARIABLE: f"{stage.budget:g}", **stage.environment}
    with _interruptible(), log.open("wb") as output:
        process = subprocess.Popen(
            stage.command, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        failures += _failure(process.wait(stage.budget))
    except subprocess.TimeoutExpired:
        failures.append(f"not done after {stage.budget:g} s")
    finally:
        _end(process, grace)
    seconds = time.monotonic() - start
    try:
        findings = stage.read()
    except (OSError, ValueError, LookupError) as error:
        findings = Findings(failures=(f"left no report: {error!r}; {_last_line(log)}",))
    failures += findings.failures
    return StageResult(
        stage.name,
        seconds,
        stage.budget,
        findings.figures,
        tuple(failures),
        findings.notes,
        log.read_text(errors="replace")[-_MAX_OUTPUT:] if failures else "",
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets commands that start within be interrupted. They inherit that a signal is ignored, as
    shells do for what runs in the background, but no handler."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _failure(status: int) -> list[str]:
    """Returns why a command with this exit status failed; nothing if it did not."""
    if status < 0:
        return [f"died of {signal.Signals(-status).name}"]
    return [f"exit status {status}"] if status else []


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return "its last line: " + next((line for line in reversed(lines) if line.strip()), "none")


def _end(process: "subprocess.Popen[bytes]", grace: float) -> None:
    """Ends the command, which may write its report before, and whatever it has started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _wait_for_group(process.pid, grace)


def _wait_for_group(group: int, seconds: float) -> None:
    """Waits until no process of a group runs, since the next stage needs their memory."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and _runs(group):
        time.sleep(_POLL_SECONDS)


def _runs(group: int) -> bool:
    """Returns whether a process of the group exists that is no zombie: those hold no memory, and
    the init of a container may leave them for seconds."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = [state for state in map(_group_and_state, Path("/proc").glob("[0-9]*/stat")) if state]
    return not states or any(found == group and state != "Z" for found, state in states)


def _group_and_state(stat: Path) -> tuple[int, str] | None:
    """Returns the group and the state of a process; None if it has ended."""
    try:
        state, _parent, group, *_ = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(group), state
