"""Shared parts of kernel tests: tolerances, poisoned outputs, combinations. Runs on any device."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.support.grids import pairwise as pairwise

FP8 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

# Of a result whose sums are in float32: the rounding of the type, one unit in its last place, and
# beside it what cancels, relative to the largest of the tensor.
RELATIVE = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 4e-6, FP8: 2**-3}
ABSOLUTE = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 2e-6, FP8: 2**-9}


Device = torch.device | str


def poisoned(*shape: int, dtype: torch.dtype, device: Device = "cpu") -> torch.Tensor:
    """All NaN, so that what a kernel does not write is seen."""
    return torch.full(shape, torch.nan, dtype=torch.float32, device=device).to(dtype)


def on_poisoned_memory(kernel: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """The kernel's result, with NaN for what it does not write of the memory that torch gives."""
    torch.use_deterministic_algorithms(True)
    try:
        return kernel(*given)
    finally:
        torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, device: Device = "cpu") -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def apart(tensor: torch.Tensor, gap: int = 5) -> torch.Tensor:
    """The same values with `gap` NaNs between the rows of the first dimension."""
    width = tensor[0].numel()
    wide = poisoned(len(tensor), width + gap, dtype=tensor.dtype, device=tensor.device)
    view = wide[:, :width].unflatten(1, tensor.shape[1:])
    view.copy_(tensor)
    return view


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0, rounded: float = 0.0
) -> None:
    """`expected` is in float64; the tolerances are those of the type of `actual`, times `slack`.

    `rounded`: the size of a number that had to be rounded on the way to a small result.
    """
    assert expected.dtype == torch.float64
    scale = max(rounded, expected.abs().max().item() if expected.numel() else 0.0)
    kind = torch.finfo(actual.dtype)
    half_of_smallest = kind.smallest_normal * kind.eps / 2  # what rounding to a subnormal may cost
    torch.testing.assert_close(
        actual.double(),
        expected,
        rtol=slack * RELATIVE[actual.dtype],
        atol=slack * ABSOLUTE[actual.dtype] * scale + half_of_smallest,
    )


def each_case(
    cases: Sequence[dict[str, Any]], num_quick: int | None = None
) -> pytest.MarkDecorator:
    """Parametrizes `case`; those after the first `num_quick` are `slow`."""
    quick = len(cases) if num_quick is None else num_quick
    slow = [pytest.param(case, marks=pytest.mark.slow) for case in cases[quick:]]
    return pytest.mark.parametrize("case", [*cases[:quick], *slow], ids=str)
