"""CPU as the device of the benchmark of a GPU, on which kernels are interpreted or emulated. Its
clock is the host's, and what it records runs again.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.models.cuda_graphs import CudaRecorder, Step
from baton.engine.executor.models.hf import PreTrainedModel
from baton.engine.executor.models.transformers_model import AttentionHook
from baton.engine.executor.triton_backend import TritonBackend
from baton.engine.llm import LLM
from tests.support.engine.recorded_steps import Rerun


class CpuDevice:
    """CPU, as a `bench.gpu.timing.Device`. Engines have `num_blocks` blocks."""

    name = "cpu"
    properties = SimpleNamespace(name="emulated GPU", major=9, minor=0, total_memory=2**30)

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def wait(self) -> None:
        pass

    def seconds(self, work: Callable[[], object], num_times: int) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def recorder(self) -> Rerun:
        return Rerun()

    def engine(self, model: PreTrainedModel, hook: AttentionHook, config: EngineConfig) -> LLM:
        config = replace(config, kernels="triton", num_blocks=self._num_blocks)
        loaded = assemble(model, hook, config, "", "random weights", b"")
        assert isinstance(loaded.backend, TritonBackend)
        return LLM(EngineCore(config, replace(loaded, backend=RerunBackend(loaded.backend))))


class RerunBackend(TritonBackend):
    """Copy of a backend that records decode steps on a CPU."""

    def __init__(self, backend: TritonBackend) -> None:
        vars(self).update(vars(backend))
        self._recorder = _Recorder()

    def _has_graphs(self, _attention: TritonAttention) -> bool:
        return self._config.cuda_graphs


class _Recorder(CudaRecorder):
    def __init__(self) -> None:
        pass

    def use_new_pool(self) -> None:
        pass

    def record(self, step: Step) -> Step:
        return Rerun().record(step)
