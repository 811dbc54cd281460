"""The batch-invariant linear layer: right, and bitwise the same in any batch."""

import pytest
import torch

from baton_kernels.rows.linear import linear, reference_linear, splits
from tests.support.kernels.comparison import (
    FLOATS,
    apart,
    assert_close,
    each_case,
    on_poisoned_memory,
    pairwise,
    random,
)

CASES = pairwise(
    num_rows=(1, 2, 128, 131),
    num_columns=(1, 80, 300),
    depth=(1, 64, 72, 1100, 2048),
    has_bias=(False, True),
    is_apart=(False, True),
    dtype=FLOATS,
)


@each_case(CASES, num_quick=5)
def test_linear_matches_float64(case: dict) -> None:
    dtype, depth = case["dtype"], case["depth"]
    x = random(case["num_rows"], depth, dtype=dtype)
    weight = random(case["num_columns"], depth, dtype=dtype)
    bias = random(case["num_columns"], dtype=dtype) if case["has_bias"] else None
    given = (apart(x), apart(weight)) if case["is_apart"] else (x, weight)
    out = on_poisoned_memory(linear, *given, bias)
    expected = reference_linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    assert_close(out, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("depth", [96, 1100])
def test_linear_is_batch_invariant(depth: int, dtype: torch.dtype) -> None:
    x = random(131, depth, dtype=dtype)
    weight = random(70, depth, dtype=dtype)
    together = linear(x, weight)
    for rows in ([0], [130], [128, 5, 127]):
        assert torch.equal(linear(x[rows], weight), together[rows])


def test_linear_is_same_for_parallel_and_sequential_splits() -> None:
    x, weight, bias = torch.randn(3, 1024), torch.randn(70, 1024), torch.randn(70)
    assert splits(70, 1024, torch.float32) == (2, 512)
    side_by_side = linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias, enough_tiles=1), side_by_side)


def test_linear_splits_cover_any_depth() -> None:
    for depth in (1, 63, 64, 511, 1024, 4096, 14336, 14337):
        for columns in (1, 128, 4096, 128256):
            number, each = splits(columns, depth, torch.bfloat16)
            assert (number - 1) * each < depth <= number * each
            assert each % 64 == 0


def test_linear_refuses_wrong_shape_or_dtype() -> None:
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with pytest.raises(ValueError, match="weight is float16; must be float32"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match=r"weight has shape \(8, 3\); must have \(8, 8\)"):
        linear(x, weight.T)
    with pytest.raises(ValueError, match=r"bias has shape \(2,\); must have \(3,\)"):
        linear(x, weight, torch.ones(2))
