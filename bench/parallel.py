"""Cases of a benchmark that are computed and not timed, on all cores."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


def in_processes(function: Callable[[Case], Result], cases: Iterable[Case]) -> list[Result]:
    """Returns the result of each case, computed in a process per core."""
    num_cores = len(os.sched_getaffinity(0))
    spawn = get_context("spawn")  # torch and gRPC, which cases import, have threads
    with ProcessPoolExecutor(num_cores, spawn) as pool:
        return list(pool.map(function, cases))
