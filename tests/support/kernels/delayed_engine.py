"""Engine whose GPU is late: every forward begins with a kernel that does nothing for a while.

What then happens on the host before the GPU has done its work happens too early. On a CPU nothing
is late, and the same tests pass.
"""

from dataclasses import replace

import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import load
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.attention.interface import Attention, StepBatch
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.runner import DecoderModel
from baton.engine.llm import LLM

_MAX_CLOCK_HZ = 3e9  # no GPU is faster; one that idles is several times slower


class DelayedModel:
    """Decoder model behind a delay.

    Attributes:
        num_cycles: clock cycles of the GPU before each forward, on the forward's stream.
    """

    def __init__(self, model: DecoderModel) -> None:
        self.execution, self.has_mrope = model.execution, model.has_mrope
        self.num_cycles = 0
        self._model = model

    def use(self, paged: Attention | None) -> None:
        self._model.use(paged)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
        features: EncoderFeatures | None = None,
    ) -> torch.Tensor:
        if self.num_cycles:
            torch.cuda._sleep(self.num_cycles)
        return self._model.forward(token_ids, positions, batch, logit_rows, features)


def delayed_engine(path: str, config: EngineConfig) -> tuple[LLM, DelayedModel]:
    """Returns an engine, and its model, which has no delay yet."""
    loaded = load(path, config, lambda _phase, _fraction: None)
    model = DelayedModel(loaded.model)
    return LLM(EngineCore(config, replace(loaded, model=model))), model


def cycles(seconds: float, device: torch.device) -> int:
    """Returns clock cycles of a device that take `seconds` or more; 0 for a CPU."""
    return int(seconds * _MAX_CLOCK_HZ) if device.type == "cuda" else 0
