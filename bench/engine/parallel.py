"""Parallel computation of benchmark cases that are not timed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_processes(module: str, cases: Iterable[Sequence[str]]) -> list[Any]:
    """Returns the JSON that `python -m module`, with each case as its arguments, prints: in the
    order of the cases, with a process per core."""

    def result(case: Sequence[str]) -> Any:
        command = [sys.executable, "-m", module, *case]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(result, cases))
