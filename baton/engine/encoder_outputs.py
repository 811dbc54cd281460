"""Encoder outputs that a caller of an async engine holds, or fills with another worker's."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.metering.step_times import StepTimes
from baton.engine.scheduler.kv.encoder_cache import HeldOutput


@dataclass(frozen=True, slots=True)
class EncodedOutput:
    """Encoder output that is held: its rows are in these blocks of the encoder pool, in order.

    Attributes:
        was_cached: nothing was computed for it.
        times: times of the step that computed it, or of the one that found it cached.
    """

    block_ids: tuple[int, ...]
    was_cached: bool
    times: StepTimes

    @classmethod
    def of(cls, held: HeldOutput, times: StepTimes) -> "EncodedOutput":
        return cls(held.block_ids, held.was_cached, times)


class ArrivingOutput:
    """Encoder output that comes from another worker."""

    def __init__(self, answer: "asyncio.Future[EncodedOutput]", commit: Callable[[], None]) -> None:
        self._answer = answer
        self._commit = commit

    async def block_ids(self) -> tuple[int, ...]:
        """Waits for room; returns the blocks of the encoder pool to fill, in the order of the rows.
        Empty if the output is cached by now, and nothing is to be filled. May be called again."""
        return (await asyncio.shield(self._answer)).block_ids

    def commit(self) -> None:
        """Makes the output usable by all sequences, once its blocks have been filled."""
        self._commit()
