"""Row-wise operations of the C library against float64, their form in torch and transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from baton.engine.executor.models.rowwise import TorchRowwise
from baton_kernels.cpu.rowwise import DTYPES, Rotation, RowwiseKernels
from tests.support.kernels.comparison import (
    apart,
    assert_close,
    each_case,
    on_poisoned_memory,
    pairwise,
    random,
)

pytestmark = pytest.mark.system  # a C compiler

EPS = 1e-6
FLOATS = sorted(DTYPES, key=str)
EACH_DTYPE = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@each_case(pairwise(num_rows=(1, 7), heads=((), (3,)), width=(1, 80, 1000), dtype=FLOATS))
def test_rms_norm_matches_float64(case: dict) -> None:
    x = random(case["num_rows"], *case["heads"], case["width"], dtype=case["dtype"])
    weight = random(case["width"], dtype=case["dtype"])
    kernel = RowwiseKernels(case["dtype"]).rms_norm
    expected = torch.nn.functional.rms_norm(x.double(), weight.shape, weight.double(), EPS)
    assert_close(on_poisoned_memory(kernel, x, weight, EPS), expected)
    assert_close(on_poisoned_memory(kernel, apart(x), weight, EPS), expected)


@each_case(pairwise(num_rows=(1, 3), width=(1, 48, 1100), dtype=FLOATS))
def test_silu_and_multiply_rounds_both_results(case: dict) -> None:
    gate_up = 3 * random(case["num_rows"], 2 * case["width"], dtype=case["dtype"])
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate).to(case["dtype"]).double() * up
    assert_close(
        on_poisoned_memory(RowwiseKernels(case["dtype"]).silu_and_multiply, gate_up), expected
    )


@EACH_DTYPE
def test_silu_and_multiply_is_torchs_at_the_limits(dtype: torch.dtype) -> None:
    gates = [-1e30, -1e4, -90.0, -88.0, -0.0, 0.0, 88.0, 1e4, 1e30, torch.inf, torch.nan]
    gate_up = torch.tensor([gates + [3.0] * len(gates)], dtype=dtype)
    found = RowwiseKernels(dtype).silu_and_multiply(gate_up)
    expected = TorchRowwise().silu_and_multiply(gate_up)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dim", [2, 6, 64])
@EACH_DTYPE
def test_rotate_rounds_as_transformers(dtype: torch.dtype, dim: int) -> None:
    heads, positions, rotation = _rotated(dtype, dim, is_adjacent=False)
    cos, sin = rotation.table[positions].repeat(1, 2, 1)[None].unbind(-1)
    query = heads.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(query, query, cos, sin)
    found = RowwiseKernels(dtype).rotate(heads.clone(), positions, rotation)
    _check_rotated(found, expected[0].transpose(0, 1))


# torch has no complex numbers of bfloat16, as which it rotates adjacent pairs.
@pytest.mark.parametrize(
    ("dtype", "is_adjacent"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
)
def test_rotate_is_that_of_torch(dtype: torch.dtype, is_adjacent: bool) -> None:
    heads, positions, rotation = _rotated(dtype, 32, is_adjacent=is_adjacent)
    expected = TorchRowwise().rotate(heads, positions, rotation)
    _check_rotated(RowwiseKernels(dtype).rotate(heads.clone(), positions, rotation), expected)


def test_rotate_leaves_other_heads_unchanged() -> None:
    heads, positions, rotation = _rotated(torch.float32, 16, is_adjacent=True)
    before = heads.clone()
    out = RowwiseKernels(torch.float32).rotate(heads[:, :3], positions, rotation)
    assert out.data_ptr() == heads.data_ptr()
    assert torch.equal(heads[:, 3:], before[:, 3:])
    assert not torch.equal(heads[:, :3], before[:, :3])


@EACH_DTYPE
def test_rows_are_bitwise_equal_in_any_batch(dtype: torch.dtype) -> None:
    kernels = RowwiseKernels(dtype)
    x, weight = random(300, 200, dtype=dtype), random(200, dtype=dtype)
    _, positions, rotation = _rotated(dtype, 20, is_adjacent=False)
    positions = positions.repeat(60)

    def computed(rows: slice) -> list[torch.Tensor]:
        part = x[rows]
        heads = part.unflatten(1, (10, 20)).clone()
        return [
            kernels.rms_norm(part, weight, EPS),
            kernels.silu_and_multiply(part),
            kernels.rotate(heads, positions[rows], rotation),
        ]

    together = computed(slice(None))
    for i in range(0, 300, 37):
        for one, all_rows in zip(computed(slice(i, i + 1)), together, strict=True):
            assert torch.equal(one[0], all_rows[i])


def _rotated(
    dtype: torch.dtype, dim: int, *, is_adjacent: bool
) -> tuple[torch.Tensor, torch.Tensor, Rotation]:
    """Returns heads, positions and a rotation."""
    angles = torch.arange(50)[:, None] * torch.linspace(1, 0.01, dim // 2)
    table = torch.stack([angles.cos(), angles.sin()], dim=-1).to(dtype)
    return random(5, 4, dim, dtype=dtype), torch.randint(50, (5,)), Rotation(table, is_adjacent)


def _check_rotated(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In bfloat16 bitwise: each product and each sum is rounded."""
    if found.dtype == torch.bfloat16:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
