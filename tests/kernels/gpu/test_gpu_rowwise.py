"""Norms and activations on a GPU, against float64."""

import pytest
import torch

from baton_kernels.rows.activation import (
    clamped_swiglu,
    reference_clamped_swiglu,
    reference_silu_and_multiply,
    silu_and_multiply,
)
from baton_kernels.rows.norm import add_rms_norm, reference_rms_norm, rms_norm
from tests.support.kernels.comparison import FLOATS, assert_close, on_poisoned_memory, random

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@DTYPES
@pytest.mark.parametrize(("num_rows", "width"), [(1, 4096), (4097, 4096), (300, 5120), (9, 16384)])
def test_rms_norm_matches_float64(
    gpu: torch.device, num_rows: int, width: int, dtype: torch.dtype
) -> None:
    x, stream = (random(num_rows, width, dtype=dtype, device=gpu) for _ in range(2))
    weight = random(width, dtype=dtype, device=gpu)
    out = on_poisoned_memory(rms_norm, x, weight, 1e-5)
    assert_close(out, reference_rms_norm(x.double(), weight.double(), 1e-5))
    total = x.double() + stream.double()
    out = on_poisoned_memory(add_rms_norm, x, stream, weight, 1e-5)
    assert_close(stream, total)
    assert_close(out, reference_rms_norm(stream.double(), weight.double(), 1e-5))


@DTYPES
def test_rms_norm_is_batch_invariant(gpu: torch.device, dtype: torch.dtype) -> None:
    x = random(1000, 4096, dtype=dtype, device=gpu)
    weight = random(4096, dtype=dtype, device=gpu)
    together = rms_norm(x, weight, 1e-5)
    for rows in ([0], [999], [3, 500, 77]):
        assert torch.equal(rms_norm(x[rows], weight, 1e-5), together[rows])


@DTYPES
@pytest.mark.parametrize(("num_rows", "width"), [(1, 14336), (4097, 14336), (33, 1000)])
def test_gated_activation_matches_float64(
    gpu: torch.device, num_rows: int, width: int, dtype: torch.dtype
) -> None:
    gate_up = random(num_rows, 2 * width, dtype=dtype, device=gpu)
    out = on_poisoned_memory(silu_and_multiply, gate_up)
    assert_close(out, reference_silu_and_multiply(gate_up.double()))
    out = on_poisoned_memory(clamped_swiglu, gate_up, 1.702, 1.5)
    assert_close(out, reference_clamped_swiglu(gate_up.double(), 1.702, 1.5))
