"""Steps of engines in this process that wait before they compute, by a hook of torch's. For models
that run as transformers has them: others call no modules."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.support.engine.deferred_stream import DeferredStream

_TIMEOUT = 20.0


class HeldSteps:
    """Steps after the first `num_free`, which wait until `let_go`.

    Attributes:
        num_tokens: tokens of each step, held ones included.
    """

    def __init__(self, num_free: int) -> None:
        self.num_tokens: list[int] = []
        self._num_free = num_free
        self._may_go = threading.Event()

    def let_go(self) -> None:
        self._may_go.set()

    def before(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        """Counts a step by the embedding of its tokens, in the engine's thread."""
        if isinstance(module, torch.nn.Embedding):
            self.num_tokens.append(arguments[0].numel())
            if len(self.num_tokens) > self._num_free:
                assert self._may_go.wait(_TIMEOUT), "a step was held for ever"


@contextmanager
def held_after(num_free: int) -> Iterator[HeldSteps]:
    """Holds steps that begin in the `with` block, after the first `num_free`, and lets them go at
    its end."""
    steps = HeldSteps(num_free)
    hook = register_module_forward_pre_hook(steps.before)
    DeferredStream.is_early = False
    try:
        yield steps
    finally:
        DeferredStream.is_early = True
        steps.let_go()
        hook.remove()
