"""Placements whose encoder sources a test chooses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton_router.routing.placement.decision import Decision
from baton_router.routing.placement.encoder_sources import EncoderChoice
from baton_router.routing.placement.placer import Placer
from tests.support.router.scripted import HANDOFFS

Choose = Callable[[int], tuple[EncoderChoice, ...]]
"""Returns the encoder choices of an attempt, by its number from 0."""


class EncodingPlacer(Placer):
    """Placer of one request. `is_alone`: the decode worker computes the prompt itself."""

    def __init__(self, fleet: Any, choose: Choose, *, is_alone: bool = False) -> None:
        super().__init__(fleet, HANDOFFS)
        self._choose = choose
        self._is_alone = is_alone
        self._num_attempts = 0

    def place(self, *args: Any, **kwargs: Any) -> Decision:
        decision = super().place(*args, **kwargs)
        if decision.placement is None:
            return decision
        placement = replace(decision.placement, encoders=self._choose(self._num_attempts))
        self._num_attempts += 1
        if self._is_alone:
            placement = replace(placement, prefill="", chosen=placement.chosen[1:])
        return replace(decision, placement=placement)
