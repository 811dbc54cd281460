"""Threads for long conversations."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

# Turns above which a thread converts or renders a conversation.
_THREAD_FROM_TURNS = 16


async def in_thread_if_long(
    num_turns: int, make: Callable[..., _Result], *arguments: object
) -> _Result:
    """Returns what `make` makes of a conversation, in a thread if it has many turns."""
    if num_turns > _THREAD_FROM_TURNS:
        return await asyncio.to_thread(make, *arguments)
    return make(*arguments)
