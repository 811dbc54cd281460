"""Kernels compiled ahead for `make gpu`, without a GPU: those that the benchmarks and the tests
launch on an H100.

    python -m tests.support.kernels.compiled_ahead FOLDER

writes them to the bundle in FOLDER. Both run with tensors that have shapes and no numbers, and with
a Triton driver that compiles and launches nothing: most of the tests fail, after their kernels were
compiled. As a plugin of pytest, this module replaces the GPU.
"""

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import triton
from torch.overrides import TorchFunctionMode

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import assemble
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.models.hf import PreTrainedModel
from baton.engine.executor.models.transformers_model import AttentionHook
from baton.engine.llm import LLM
from baton_kernels import block_copy
from baton_kernels.compile import MODULES
from baton_kernels.gpu import H100
from bench.gpu.bundle import pack
from bench.gpu.engine import random_engine
from bench.gpu.gpu import measure
from bench.gpu.kernels import cases
from bench.gpu.sizes import AttentionShape, KernelSizes, Sizes
from bench.gpu.stages import TESTS
from bench.gpu.timing import Bench, Work
from bench.report import CasesFailedError
from tests.support.engine.recorded_steps import Rerun
from tests.support.ptx.driver import Compiler, install
from tests.support.repository import ROOT

_META: Final = torch.device("meta")
SINGLE_LAYER: Final = Sizes(
    kernels=KernelSizes(
        AttentionShape(num_layers=1), AttentionShape(num_layers=1, block_size=64), sdpa={}
    )
)
"""Sizes of the benchmark with one of many equal layers, and without torch's own kernels."""
# Functions that want the numbers of a tensor: they get zeros.
_READS: Final = {
    "cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
    "__array__",
}  # fmt: skip


class WithoutNumbers(TorchFunctionMode):
    """Mode in which tensors of a GPU have no memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        args = tuple(map(_without_gpu, args))
        kwargs = {key: _without_gpu(value) for key, value in (kwargs or {}).items()}
        if name == "pin_memory":
            return args[0]
        if name in ("equal", "allclose"):
            return True
        if name == "isfinite":
            return torch.ones(args[0].shape, dtype=torch.bool)
        is_number = name == "std" and len(args) == 1  # and the whole tensor's
        if name in _READS or is_number or (name == "to" and "cpu" in map(str, args[1:])):
            args = tuple(map(_zeros, args))
        return func(*args, **kwargs)


def _without_gpu(value: Any) -> Any:
    is_gpu = isinstance(value, torch.device | str) and str(value).startswith("cuda")
    return _META if is_gpu else value


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device == _META:
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def replace_gpu() -> None:
    """Has Triton compile for an H100, and torch describe one, from now on in this process."""
    properties = SimpleNamespace(
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=H100.shared_memory,
        shared_memory_per_multiprocessor=H100.shared_memory + 1024,
        regs_per_multiprocessor=2**16,
        max_threads_per_multi_processor=2048,
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.get_device_capability = lambda *_: H100.capability
    cuda.get_device_properties = lambda *_: properties
    block_copy._check_reach = lambda **_: None
    install(Compiler())
    for module in MODULES:  # compiled kernels, as they are defined before the next line
        importlib.import_module(module)
    triton.knobs.runtime.interpret = True  # engines ask whether kernels run without a GPU
    del os.environ["TRITON_INTERPRET"]  # which other processes would do; Triton has set it


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    replace_gpu()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    with WithoutNumbers():
        return (yield)


class MetaDevice:
    """Device without numbers or time, as a `bench.gpu.timing.Device`."""

    name = "meta"
    properties = None

    def wait(self) -> None:
        pass

    def seconds(self, work: Work, num_times: int) -> float:
        return 1.0

    def recorder(self) -> Rerun:
        return Rerun()

    def engine(self, model: PreTrainedModel, hook: AttentionHook, config: EngineConfig) -> LLM:
        config = replace(config, num_blocks=4096, kernels="triton")
        loaded = assemble(model, hook, config, "", "random weights", b"")
        return LLM(EngineCore(config, loaded))


def run_benchmarks(sizes: Sizes) -> None:
    """Launches what the benchmarks do. Engines are warmed up: later they compile nothing."""
    bench = Bench(MetaDevice(), sizes, repeats=1)
    engines = sizes.engine
    for model in (engines.model, engines.host_model):
        run_engine(bench, model)
    run_engine(bench, engines.model, deterministic=True, max_drafts=engines.max_drafts)
    measured = measure({"kernels": cases(bench)})
    if measured.failures:
        raise CasesFailedError(measured.rows, measured.failures)


def run_engine(bench: Bench, model: Mapping[str, Any], **changes: Any) -> None:
    with random_engine(bench, {**model, "num_hidden_layers": 1}, **changes):
        pass


def main() -> None:
    bundle = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_STORE_BINARY_ONLY": "1"}
        replace_gpu()
        with WithoutNumbers():
            run_benchmarks(SINGLE_LAYER)
        print(f"{pack(Path(cache), bundle)} kernels of the benchmarks", flush=True)
        pytest_options = ("-q", "-c", "tests/gpu.ini", "--rootdir", ".", "-p", __spec__.name)
        command = (sys.executable, "-m", "pytest", *pytest_options, "--tb=no", "-rN")
        subprocess.run((*command, *sys.argv[2:], *TESTS), check=False, cwd=ROOT)
        print(f"{pack(Path(cache), bundle)} kernels in {bundle}")


if __name__ == "__main__":
    main()
