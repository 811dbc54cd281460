"""Threads for long texts and conversations."""

import asyncio
import os
from collections.abc import Callable
from typing import TypeVar

from baton.fairness.fair_threads import FairThreads

_Result = TypeVar("_Result")

_MAX_THREADS = 32
# Texts that wait for a thread, of all tenants.
_MAX_WAITING = 1024
# Turns above which a thread converts or renders a conversation.
_THREAD_FROM_TURNS = 16


async def in_thread_if_long(
    num_turns: int, make: Callable[..., _Result], *arguments: object
) -> _Result:
    """Returns what `make` makes of a conversation, in a thread if it has many turns."""
    if num_turns > _THREAD_FROM_TURNS:
        return await asyncio.to_thread(make, *arguments)
    return make(*arguments)


def text_threads() -> FairThreads:
    """Returns threads that tokenize and render long texts: one a core, which a tenant may have, and
    one more, which another tenant's text finds free."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return FairThreads(min(_MAX_THREADS, 1 + (cores or 1)), _MAX_WAITING, "tokenization")
