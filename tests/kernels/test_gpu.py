"""Limits of GPUs: the tiles that fit them, and the programs that run at once."""

from types import SimpleNamespace

import pytest
import torch

from baton_kernels.attention.inputs import HEAD_DIMS
from baton_kernels.attention.tiling import choose_tiling
from baton_kernels.gpu import FP8_TARGETS, GPUS, occupancy, resident_programs

BF16 = torch.bfloat16
H100 = SimpleNamespace(
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    shared_memory_per_multiprocessor=228 * 1024,
)


@pytest.mark.parametrize(
    ("registers", "warps", "shared", "expected"),
    [
        (168, 4, 72192, 3),  # decode attention, heads of 128: both limits
        (168, 4, 0, 3),
        (32, 4, 72192, 3),
        (32, 1, 0, 64),  # by threads
        (255, 8, 132096, 1),
        (255, 16, 227 * 1024, 1),
    ],
)
def test_occupancy_is_least_of_registers_shared_and_threads(
    registers: int, warps: int, shared: int, expected: int
) -> None:
    assert occupancy(registers, warps, shared, H100) == expected


def test_resident_programs_fill_every_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as run at once: more would run in a second wave, on few multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    kernel = SimpleNamespace(n_regs=168, metadata=SimpleNamespace(num_warps=4, shared=72192))
    assert resident_programs(kernel, torch.device("cuda")) == 3 * 132


def test_choose_tiling_prefetches_less_with_less_shared_memory() -> None:
    large, small = (choose_tiling(256, BF16, BF16, 8, GPUS[n]).prefill for n in (80, 86))
    assert (large.rows, large.keys) == (small.rows, small.keys)
    assert (large.num_stages, small.num_stages) == (5, 3)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_choose_tiling_sums_alike_on_every_gpu_if_deterministic(head_dim: int) -> None:
    tilings = [choose_tiling(head_dim, BF16, BF16, 8, gpu, True) for gpu in GPUS.values()]
    sizes = {(t.rows, t.keys, t.num_warps) for each in tilings for t in (each.decode, each.prefill)}
    assert len(sizes) == 1


def test_choose_tiling_takes_large_tiles_with_wgmma_only() -> None:
    rows = {n: choose_tiling(128, BF16, BF16, 8, gpu).prefill.rows for n, gpu in GPUS.items()}
    assert rows == {80: 64, 86: 64, 89: 64, 90: 128, 100: 128, 120: 64}
    assert FP8_TARGETS == (89, 90, 100, 120)
