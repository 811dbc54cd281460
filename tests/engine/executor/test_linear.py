"""Linear layers on a CPU: the same result whichever way they are computed."""

import pytest
import torch

from baton.engine.executor.models import linear


@pytest.mark.parametrize("rows", [1, 7, 8, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_bfloat16_rows_equal_the_exact_product(rows, has_bias):
    """In parts of 100 numbers, the last of which is smaller."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(n, 16, generator=generator).bfloat16() for n in (23, rows))
    bias = torch.randn(23, generator=generator).bfloat16() if has_bias else None
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    layer = linear.TorchLinear(weight, bias, converts=lambda _weight: True, part=100)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-7)
    residual = torch.randn(rows, 23, generator=generator).bfloat16()
    added = layer.plus(x, residual)
    torch.testing.assert_close(added.double(), exact + residual.double(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_bfloat16_rows_equal_those_of_torch(rows):
    """In the form that this CPU gets, packed where it has instructions for bfloat16."""
    generator = torch.Generator().manual_seed(rows)
    weight, x, residual = (
        torch.randn(n, m, generator=generator).bfloat16()
        for n, m in ((64, 96), (rows, 96), (rows, 64))
    )
    layer, expected = linear.TorchLinear(weight), torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer.plus(x, residual), expected + residual)


@pytest.mark.system  # a C compiler
def test_float32_weights_are_kept_in_bfloat16_if_equal():
    """All of the weight: its first row alone does not tell."""
    weight = torch.randn(96, 32).bfloat16().float()
    x = torch.randn(5, 32)
    kept = linear.linear_in_c(weight, None)
    assert kept.panels.num_bytes == 96 * 32 * 2  # whole panels
    torch.testing.assert_close(kept(x), torch.nn.functional.linear(x, weight))
    weight[69, 31] = 1 + 2**-20
    assert linear.linear_in_c(weight, None).panels.num_bytes == 96 * 32 * 4


@pytest.mark.system
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_an_odd_number_of_inputs_are_multiplied(dtype):
    weight, x = (torch.randn(n, 33).to(dtype) for n in (20, 4))
    found = linear.linear_in_c(weight, None)(x)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight))
