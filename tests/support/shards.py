"""Shards of a run of pytest: processes side by side, where pytest-xdist is not installed.

    python -m tests.support.shards 4 -m gpu tests/gpu

runs pytest with these arguments in 4 processes, each of which runs every fourth test. All of them
append to the report of `tests.support.lanes`. As a plugin, this module selects the tests of one.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

_VARIABLE = "BATON_SHARD"
_NO_TESTS = 5  # exit status of pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects every `count`-th of the tests that other options leave."""
    if not (value := os.environ.get(_VARIABLE)):
        return
    number, count = map(int, value.split("/"))
    selected = items[number::count]
    others = [item for i, item in enumerate(items) if i % count != number]
    config.hook.pytest_deselected(items=others)
    items[:] = selected


def run(count: int, arguments: Sequence[str]) -> int:
    """Runs all shards to their end, and returns 0 if no test failed. Passes on an interrupt."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.shards", *arguments]
    shards = [
        subprocess.Popen(command, env={**os.environ, _VARIABLE: f"{number}/{count}"})
        for number in range(count)
    ]
    try:
        statuses = [shard.wait() for shard in shards]
    except KeyboardInterrupt:
        for shard in shards:
            shard.send_signal(signal.SIGINT)
        statuses = [shard.wait() or 1 for shard in shards]
    return int(any(status not in (0, _NO_TESTS) for status in statuses))


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))
