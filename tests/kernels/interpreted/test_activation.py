"""SiLU-and-multiply and its clamped form against float64."""

from functools import partial

import pytest
import torch

from baton_kernels.rows.activation import (
    clamped_swiglu,
    reference_clamped_swiglu,
    reference_silu_and_multiply,
    silu_and_multiply,
)
from tests.support.kernels.comparison import (
    FLOATS,
    apart,
    assert_close,
    each_case,
    on_poisoned_memory,
    pairwise,
    random,
)

CLAMPED = {"steepness": 1.702, "limit": 2.5}
GATES = {
    "silu": (silu_and_multiply, reference_silu_and_multiply),
    "clamped": (partial(clamped_swiglu, **CLAMPED), partial(reference_clamped_swiglu, **CLAMPED)),
}


@pytest.mark.parametrize("gate", GATES)
@each_case(pairwise(num_rows=(1, 3), width=(1, 48, 1024, 1100), dtype=FLOATS, is_apart=(0, 1)))
def test_gated_activation_matches_float64(gate: str, case: dict) -> None:
    kernel, reference = GATES[gate]
    gate_up = 3 * random(case["num_rows"], 2 * case["width"], dtype=case["dtype"])
    out = on_poisoned_memory(kernel, apart(gate_up) if case["is_apart"] else gate_up)
    assert_close(out, reference(gate_up.double()))


def test_gated_activation_is_exact_for_large_values() -> None:
    out = silu_and_multiply(torch.tensor([[-1e4, 1e4, 2.0, 3.0]]))
    assert out.tolist() == [[0.0, 3e4]]
    large = torch.tensor([[-1e4, 1e4, 1e4, 2.0, 1e4, -1e4]])
    expected = reference_clamped_swiglu(large.double(), 1.702, 7.0)
    assert_close(clamped_swiglu(large, 1.702, 7.0), expected)
    assert expected[0, 1:].round().tolist() == [56.0, -42.0]


def test_gated_activation_refuses_wrong_shape() -> None:
    with pytest.raises(ValueError, match="gate_up has 7 columns"):
        silu_and_multiply(torch.randn(2, 7))
