"""Layers of a model on a CPU, whose calls of C are recorded for steps of few tokens.

A step of one token makes some ten calls a layer, and each costs Python as long as a small product
takes. So of each number of tokens up to `MAX_TOKENS` the calls are recorded once, and repeated by
one call over the same memory, into which the step's inputs are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeGuard

import torch

from baton.engine.executor.attention.in_place_attention import InPlaceBatch
from baton.engine.executor.attention.interface import StepBatch
from baton_kernels.cpu.recording import Recording

MAX_TOKENS: Final = 8

Layers = Callable[[torch.Tensor, torch.Tensor, InPlaceBatch], torch.Tensor]
"""Computes hidden states, `[num_tokens, hidden_size]`, of those, positions and a batch."""


def is_short(batch: StepBatch) -> TypeGuard[InPlaceBatch]:
    """Returns whether a step has few tokens, and its attention is computed in C."""
    return isinstance(batch, InPlaceBatch) and len(batch.positions) <= MAX_TOKENS


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded layers, with their inputs and output."""

    calls: Recording
    hidden: torch.Tensor
    positions: torch.Tensor
    batch: InPlaceBatch
    out: torch.Tensor

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: InPlaceBatch
    ) -> torch.Tensor:
        self.hidden.copy_(hidden)
        self.positions.copy_(positions)
        self.batch.assign(batch)
        self.calls.repeat()
        return self.out


class RecordedLayers:
    """Layers that are recorded when they have computed a number of tokens before.

    Args:
        layers: computes them by calls of the C library; it is called as it is if torch computes
            some of it.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._recorded: dict[int, _Recorded] = {}
        self._seen: set[int] = set()
        self._can_repeat = True

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: InPlaceBatch
    ) -> torch.Tensor:
        """Returns what the layers do, which the next call with as many tokens may overwrite."""
        count = len(hidden)
        if (recorded := self._recorded.get(count)) is not None:
            return recorded(hidden, positions, batch)
        if count not in self._seen or not self._can_repeat:
            self._seen.add(count)
            return self._layers(hidden, positions, batch)
        hidden, positions = hidden.clone(), positions.clone()
        with Recording() as calls:
            out = self._layers(hidden, positions, batch)
        self._can_repeat = calls.can_repeat
        if calls.can_repeat:
            self._recorded[count] = _Recorded(calls, hidden, positions, batch, out)
        return out
