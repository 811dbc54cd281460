"""Linear layers of the C library against float64."""

import pytest
import torch
import torch.nn.functional as F

from baton_kernels.cpu.linear import PackedLinear
from tests.support.kernels.comparison import (
    apart,
    assert_close,
    each_case,
    on_poisoned_memory,
    pairwise,
    random,
)

pytestmark = pytest.mark.system  # a C compiler

# Dtypes of rows and weight.
FORMATS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]
EACH_FORMAT = pytest.mark.parametrize("dtypes", FORMATS, ids=str)
# Rows that are read where they lie, arranged in a group, and both; more than are computed at once.
NUM_ROWS = (1, 2, 3, 5, 6, 8, 9, 12, 17, 23, 210)


@each_case(
    pairwise(
        num_rows=NUM_ROWS,
        out_features=(1, 40, 333),
        in_features=(2, 10, 258, 1024),  # a pair, less and more than a part of them
        has_bias=(False, True),
        dtypes=FORMATS,
    )
)
def test_layer_matches_float64(case: dict) -> None:
    dtype, weight_dtype = case["dtypes"]
    x = random(case["num_rows"], case["in_features"], dtype=dtype)
    weight = random(case["out_features"], case["in_features"], dtype=weight_dtype)
    bias = random(case["out_features"], dtype=dtype) if case["has_bias"] else None
    layer = PackedLinear(weight, bias, dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(on_poisoned_memory(layer, x), exact)
    assert_close(on_poisoned_memory(layer, apart(x)), exact)


@EACH_FORMAT
def test_outputs_are_bitwise_equal_in_any_batch(dtypes: tuple) -> None:
    dtype, weight_dtype = dtypes
    layer = PackedLinear(random(70, 300, dtype=weight_dtype), None, dtype)
    x = random(max(NUM_ROWS), 300, dtype=dtype)
    together = layer(x)
    for num_rows in NUM_ROWS:
        for first in (0, 7):
            rows = slice(first, first + num_rows)
            assert torch.equal(layer(x[rows]), together[rows])


@EACH_FORMAT
@pytest.mark.parametrize("num_rows", [1, 30])
def test_plus_rounds_before_it_adds(dtypes: tuple, num_rows: int) -> None:
    dtype, weight_dtype = dtypes
    weight, bias = random(50, 64, dtype=weight_dtype), random(50, dtype=dtype)
    layer = PackedLinear(weight, bias, dtype)
    x, residual = random(num_rows, 64, dtype=dtype), random(num_rows, 50, dtype=dtype)
    before = residual.clone()
    found = layer.plus(x, residual)
    assert torch.equal(found, layer(x) + before)


@EACH_FORMAT
def test_no_rows_give_no_outputs(dtypes: tuple) -> None:
    dtype, weight_dtype = dtypes
    layer = PackedLinear(random(5, 8, dtype=weight_dtype), None, dtype)
    assert layer(torch.empty(0, 8, dtype=dtype)).shape == (0, 5)


@EACH_FORMAT
def test_rows_of_the_weight_are_those_packed(dtypes: tuple) -> None:
    dtype, weight_dtype = dtypes
    weight = random(70, 12, dtype=weight_dtype)
    indices = torch.tensor([69, 0, 33, 33])
    found = PackedLinear(weight, None, dtype).rows_of_weight(indices)
    assert torch.equal(found, weight[indices].to(dtype))


@EACH_FORMAT
def test_numbers_that_are_not_finite_reach_their_own_row(dtypes: tuple) -> None:
    """Those of the rows; one in a weight reaches its own output of each row."""
    dtype, weight_dtype = dtypes
    weight, x = random(40, 16, dtype=weight_dtype), random(20, 16, dtype=dtype)
    x[3, 5], weight[7, 2] = torch.nan, torch.inf
    found = PackedLinear(weight, None, dtype)(x)
    expected = torch.zeros(20, 40, dtype=torch.bool)
    expected[3], expected[:, 7] = True, True
    assert torch.equal(~found.isfinite(), expected)
