"""The cluster shapes that tests share, and the `baton` command as a real process."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.support.cluster.fixtures import *  # noqa: F403
from tests.support.waiting import wait_until

BATON = [sys.executable, "-m", "baton"]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and help wrap at the width of a terminal."""
    monkeypatch.setenv("COLUMNS", "200")


def baton(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [*BATON, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
    )


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command that goes on; killed at the end of the block if it still does."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*BATON, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder, **variables},
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def started(process: subprocess.Popen[str], number: int) -> list[psutil.Process]:
    """The processes it has started, Redis and the two that fork others among them, once there
    are `number`."""
    wait_until(lambda: len(descendants(process.pid)) >= number, within=120)
    return descendants(process.pid)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
    )


def interrupt(process: subprocess.Popen[str], signum: int = signal.SIGINT) -> tuple[str, str]:
    """Sends a signal and waits for the end; what it had said on stdout and stderr."""
    process.send_signal(signum)
    return process.communicate(timeout=30)
