"""SiLU-and-multiply against float64."""

import pytest
import torch
from kernel_checks import FLOATS, apart, assert_close, pairwise, poisoned, random

from kernels.activation import reference_silu_and_multiply, silu_and_multiply

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    pairwise(num_rows=(1, 3), width=(1, 48, 1024, 1100), dtype=FLOATS, is_apart=(0, 1)),
    ids=str,
)
def test_the_gate_opens_what_goes_up(case: dict) -> None:
    gate_up = random(case["num_rows"], 2 * case["width"], dtype=case["dtype"], device=CPU)
    out = poisoned(case["num_rows"], case["width"], dtype=case["dtype"], device=CPU)
    given = apart(gate_up) if case["is_apart"] else gate_up
    assert silu_and_multiply(given, out) is out
    assert_close(out, reference_silu_and_multiply(gate_up.double()))


def test_large_values_neither_overflow_nor_vanish() -> None:
    out = silu_and_multiply(torch.tensor([[-1e4, 1e4, 2.0, 3.0]]))
    assert out.tolist() == [[0.0, 3e4]]


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="gate_up has 7 columns"):
        silu_and_multiply(torch.randn(2, 7))
    with pytest.raises(ValueError, match=r"out has shape \(2, 3\); must have \(2, 4\)"):
        silu_and_multiply(torch.randn(2, 8), torch.empty(2, 3))
