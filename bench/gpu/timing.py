"""Seconds of work on a device by its own clock, and the ceilings that work is compared with."""

import gc
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.models.cuda_graphs import CudaRecorder, Recorder
from baton.engine.llm import LLM
from bench.gpu.sizes import Sizes
from bench.report import NotPossibleError, Row

if TYPE_CHECKING:
    from baton.engine.config import EngineConfig
    from baton.engine.executor.models.hf import PreTrainedModel
    from baton.engine.executor.models.transformers_model import AttentionHook

Work = Callable[[], object]
Case = tuple[str, Callable[[], list[Row]]]
"""A name, and what measures it."""
Cases = Generator[Case, None, None]
"""Cases one by one, so that one which fails takes no other with it."""

_WARM_UPS = 3


class Device(Protocol):
    """Device that is measured.

    Attributes:
        name: torch's name of it.
        properties: its name, compute capability (`major`, `minor`) and `total_memory`, as torch has
            those of a GPU.
    """

    @property
    def name(self) -> str: ...

    @property
    def properties(self) -> Any: ...

    def wait(self) -> None:
        """Waits for all work that was launched."""
        ...

    def seconds(self, work: Work, num_times: int) -> float:
        """Returns the mean of a few runs one behind the other, so that launches are hidden."""
        ...

    def recorder(self) -> Recorder: ...

    def engine(
        self, model: "PreTrainedModel", hook: "AttentionHook", config: "EngineConfig"
    ) -> "LLM":
        """Returns an engine of a model that is on the device. Consumes `model`."""
        ...


class CudaDevice:
    """GPU, as a `Device`. Raises `NotPossibleError` where there is none."""

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NotPossibleError(
                f"it needs a GPU, and torch {torch.__version__} sees none: install a CUDA build "
                "of torch and a driver"
            )
        self.properties: Any = torch.cuda.get_device_properties(0)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, work: Work, num_times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_times):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000 / num_times

    def recorder(self) -> Recorder:
        return CudaRecorder()

    def engine(
        self, model: "PreTrainedModel", hook: "AttentionHook", config: "EngineConfig"
    ) -> "LLM":
        from baton.engine.core.assembly import assemble

        loaded = assemble(model, hook, config, "", "random weights", b"")
        return LLM(EngineCore(config, loaded))


def free_memory() -> None:
    """Frees what nothing refers to, such as engines, which refer to themselves."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Bench:
    """Benchmark of a device at some sizes. `repeats`: measurements of each side."""

    device: Device
    sizes: Sizes
    repeats: int

    def recorded(self, work: Callable[[], torch.Tensor]) -> Work:
        """Returns the work as a CUDA graph, which the host launches at once."""
        replay = self.device.recorder().record(work)

        def launch() -> object:
            replay()
            return work  # keeps the memory that the graph uses

        return launch

    def rate(self, work: Work, amount: float, num_times: int = 10) -> Callable[[], float]:
        """Returns what measures `amount` per second: bytes, operations or tokens that the work
        stands for. Warms the work up."""
        for _ in range(_WARM_UPS):
            work()
        self.device.wait()
        return lambda: amount / self.device.seconds(work, num_times)

    def copy_bandwidth(self) -> Callable[[], float]:
        """Bytes read and written per second by a plain copy: what memory gives at best."""
        size = self.sizes.copied_bytes
        source = torch.empty(size, dtype=torch.uint8, device=self.device.name)
        target = torch.empty_like(source)
        return self.rate(lambda: target.copy_(source), 2 * size)

    def matrix_peak(self) -> Callable[[], float]:
        """Operations per second of a large square product: what arithmetic gives at best."""
        size, dtype = self.sizes.matrix_size, torch.bfloat16
        left, right = (
            torch.randn(size, size, dtype=dtype, device=self.device.name) for _ in range(2)
        )
        out = torch.empty_like(left)
        return self.rate(lambda: torch.mm(left, right, out=out), 2 * size**3)
