"""RMSNorm, alone and with the residual, against float64."""

import pytest
import torch

from baton_kernels.rows.norm import MAX_WIDTH, add_rms_norm, reference_rms_norm, rms_norm
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
    num_rows=(1, 2, 7), width=(1, 80, 128, 1000), dtype=FLOATS, eps=(1e-6, 1e-5), is_apart=(0, 1)
)


@each_case(CASES)
def test_rms_norm_matches_float64(case: dict) -> None:
    x = random(case["num_rows"], case["width"], dtype=case["dtype"])
    weight = random(case["width"], dtype=case["dtype"])
    given = apart(x) if case["is_apart"] else x
    out = on_poisoned_memory(rms_norm, given, weight, case["eps"])
    assert_close(out, reference_rms_norm(x.double(), weight.double(), case["eps"]))


@each_case(CASES)
def test_add_rms_norm_sums_into_residual_and_normalises_it(case: dict) -> None:
    x, stream = (random(case["num_rows"], case["width"], dtype=case["dtype"]) for _ in range(2))
    weight = random(case["width"], dtype=case["dtype"])
    total = x.double() + stream.double()
    given = apart(stream) if case["is_apart"] else stream
    out = add_rms_norm(x, given, weight, case["eps"])
    assert_close(given, total)
    assert_close(out, reference_rms_norm(given.double(), weight.double(), case["eps"]))


def test_rms_norm_takes_weight_of_other_dtype() -> None:
    x, weight = random(3, 80, dtype=torch.bfloat16), 1 + torch.randn(80)
    assert_close(rms_norm(x, weight, 1e-6), reference_rms_norm(x.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rms_norm_is_batch_invariant(dtype: torch.dtype) -> None:
    x, weight = random(7, 200, dtype=dtype), torch.randn(200).to(dtype)
    together = rms_norm(x, weight, 1e-6)
    assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6)[0], together[i]) for i in range(7))


def test_rms_norm_launches_nothing_without_rows() -> None:
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


def test_rms_norm_refuses_wrong_shape_or_dtype() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\); must have \(8,\)"):
        rms_norm(x, weight[:7], 1e-6)
    with pytest.raises(ValueError, match="residual is float16; must be float32"):
        add_rms_norm(x, x.half(), weight, 1e-6)
    with pytest.raises(ValueError, match=r"x of shape \(8, 2\) .* call .contiguous\(\)"):
        rms_norm(x.T, weight[:2], 1e-6)
    with pytest.raises(ValueError, match=f"at most {MAX_WIDTH}"):
        rms_norm(torch.empty(1, MAX_WIDTH + 1), torch.empty(MAX_WIDTH + 1), 1e-6)
