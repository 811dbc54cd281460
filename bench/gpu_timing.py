"""Seconds of work on a GPU by its own clock, and the ceilings that work is compared with."""

from collections.abc import Callable, Generator

import torch

from baton.engine.models.cuda_graphs import CudaRecorder
from bench.report import Row

Work = Callable[[], object]
Case = tuple[str, Callable[[], list[Row]]]
"""A name, and what measures it."""
Cases = Generator[Case, None, None]
"""Cases one by one, so that one which fails takes no other with it."""

_WARM_UPS = 3
_GIB = 2**30


def seconds(work: Work, num_times: int = 10) -> float:
    """The mean of a few runs one behind the other, so that launches are hidden."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / num_times


def warmed_up(work: Work) -> Work:
    """The work, once everything about it is compiled and allocated."""
    for _ in range(_WARM_UPS):
        work()
    torch.cuda.synchronize()
    return work


def recorded(work: Callable[[], torch.Tensor]) -> Work:
    """The work as a CUDA graph, which the host launches at once."""
    replay = CudaRecorder().record(work)

    def launch() -> object:
        replay()
        return work  # keeps the memory that the graph uses

    return launch


def rate(work: Work, amount: float, num_times: int = 10) -> Callable[[], float]:
    """Measures `amount` per second: bytes, operations or tokens that the work stands for."""
    warmed_up(work)
    return lambda: amount / seconds(work, num_times)


def copy_bandwidth() -> Callable[[], float]:
    """Bytes read and written per second by a plain copy: what memory gives at best."""
    source = torch.empty(2 * _GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * source.numel())


def matrix_peak(dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> Callable[[], float]:
    """Operations per second of a large square product: what arithmetic gives at best."""
    left, right = (torch.randn(size, size, dtype=dtype, device="cuda") for _ in range(2))
    out = torch.empty_like(left)
    return rate(lambda: torch.mm(left, right, out=out), 2 * size**3)
