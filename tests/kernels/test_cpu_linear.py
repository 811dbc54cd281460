"""Linear layers of the C library against float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from baton_kernels.cpu import huge_pages
from baton_kernels.cpu.linear import PackedLinear
from baton_kernels.cpu.quantized_weight import QuantizedWeight, halves_of, quantize
from tests.support.kernels.comparison import (
    apart,
    assert_close,
    each_case,
    on_poisoned_memory,
    pairwise,
    random,
)

pytestmark = pytest.mark.system  # a C compiler

Weight = torch.Tensor | QuantizedWeight

# Of bfloat16, whose products with numbers of bfloat16 are summed by pairs.
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def plain(dtype: torch.dtype) -> Callable[[int, int], Weight]:
    return lambda outputs, inputs: random(outputs, inputs, dtype=dtype)


def coded(bits: int, group: int, *, has_minima: bool) -> Callable[[int, int], Weight]:
    """Codes of all values, in groups of `group` inputs or, of an odd number of them, one."""

    def make(outputs: int, inputs: int) -> QuantizedWeight:
        num_groups = 1 if inputs % group else inputs // group
        scales, minima = torch.rand(2, outputs, num_groups)
        offsets = minima - 0.5 if has_minima else None
        codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
        if bits == 8:
            return QuantizedWeight(codes.view(torch.int8), scales, offsets)
        return QuantizedWeight(halves_of(codes), scales, offsets, LEVELS)

    return make


def float8(outputs: int, inputs: int) -> QuantizedWeight:
    """All numbers but NaN, those below the smallest normal one too."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = every[every.isfinite()]
    chosen = numbers[torch.randint(0, len(numbers), (outputs, inputs))]
    return QuantizedWeight(chosen.to(torch.float8_e4m3fn), torch.rand(outputs, 1))


# The dtype of rows, and what makes a weight.
FORMATS = {
    "float32": (torch.float32, plain(torch.float32)),
    "bfloat16 for float32": (torch.float32, plain(torch.bfloat16)),
    "bfloat16": (torch.bfloat16, plain(torch.bfloat16)),
    "8 bits": (torch.float32, coded(8, 8, has_minima=False)),
    "8 bits with minima": (torch.bfloat16, coded(8, 32, has_minima=True)),
    "float8": (torch.float32, float8),
    "float8 in bfloat16": (torch.bfloat16, float8),
    "4 bits with minima": (torch.float32, coded(4, 32, has_minima=True)),
    "4 bits": (torch.bfloat16, coded(4, 128, has_minima=False)),
}
EACH_FORMAT = pytest.mark.parametrize("name", FORMATS)
# Rows that are read where they lie, arranged in a tile, and both; more than are computed at once.
NUM_ROWS = (1, 2, 3, 5, 6, 8, 9, 12, 17, 23, 210)


def numbers(weight: Weight) -> torch.Tensor:
    return weight.numbers() if isinstance(weight, QuantizedWeight) else weight


@each_case(
    pairwise(
        num_rows=NUM_ROWS,
        out_features=(1, 40, 333),
        in_features=(8, 40, 264, 1280),  # less and more than a part of them
        has_bias=(False, True),
        name=tuple(FORMATS),
    )
)
def test_layer_matches_float64(case: dict) -> None:
    dtype, make = FORMATS[case["name"]]
    x = random(case["num_rows"], case["in_features"], dtype=dtype)
    weight = make(case["out_features"], case["in_features"])
    bias = random(case["out_features"], dtype=dtype) if case["has_bias"] else None
    layer = PackedLinear(weight, bias, dtype)
    plain_bias = None if bias is None else bias.double()
    exact = F.linear(x.double(), numbers(weight).double(), plain_bias)
    assert_close(on_poisoned_memory(layer, x), exact)
    assert_close(on_poisoned_memory(layer, apart(x)), exact)


@pytest.mark.parametrize("inputs", [2, 10])
def test_bfloat16_pairs_match_float64(inputs: int) -> None:
    weight, x = random(5, inputs, dtype=torch.bfloat16), random(3, inputs, dtype=torch.float32)
    found = PackedLinear(weight, None, torch.float32)(x)
    assert_close(found, F.linear(x.double(), weight.double()))


@EACH_FORMAT
def test_outputs_are_bitwise_equal_in_any_batch(name: str) -> None:
    dtype, make = FORMATS[name]
    layer = PackedLinear(make(70, 320), None, dtype)
    x = random(max(NUM_ROWS), 320, dtype=dtype)
    together = layer(x)
    for num_rows in NUM_ROWS:
        for first in (0, 7):
            rows = slice(first, first + num_rows)
            assert torch.equal(layer(x[rows]), together[rows])


@EACH_FORMAT
@pytest.mark.parametrize("num_rows", [1, 30])
def test_plus_rounds_before_it_adds(name: str, num_rows: int) -> None:
    dtype, make = FORMATS[name]
    layer = PackedLinear(make(50, 64), random(50, dtype=dtype), dtype)
    x, residual = random(num_rows, 64, dtype=dtype), random(num_rows, 50, dtype=dtype)
    before = residual.clone()
    found = layer.plus(x, residual)
    assert torch.equal(found, layer(x) + before)


@EACH_FORMAT
def test_no_rows_give_no_outputs(name: str) -> None:
    dtype, make = FORMATS[name]
    layer = PackedLinear(make(5, 8), None, dtype)
    assert layer(torch.empty(0, 8, dtype=dtype)).shape == (0, 5)


@EACH_FORMAT
def test_rows_of_the_weight_are_those_packed(name: str) -> None:
    dtype, make = FORMATS[name]
    weight = make(70, 64)
    indices = torch.tensor([69, 0, 33, 33])
    found = PackedLinear(weight, None, dtype).rows_of_weight(indices)
    assert torch.equal(found, numbers(weight)[indices].to(dtype))


@EACH_FORMAT
def test_numbers_that_are_not_finite_reach_their_own_row(name: str) -> None:
    """Those of the rows; one in a weight, or a scale, reaches its own output of each row."""
    dtype, make = FORMATS[name]
    weight, x = make(40, 16), random(20, 16, dtype=dtype)
    x[3, 5] = torch.nan
    (weight.scales if isinstance(weight, QuantizedWeight) else weight)[7, 0] = torch.inf
    found = PackedLinear(weight, None, dtype)(x)
    expected = torch.zeros(20, 40, dtype=torch.bool)
    expected[3], expected[:, 7] = True, True
    assert torch.equal(~found.isfinite(), expected)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [8, 32])
def test_quantized_numbers_are_within_half_a_step(bits: int, group: int) -> None:
    """In 4 bits the largest number has one level, -8, of which there is no opposite."""
    weight = random(70, 96, dtype=torch.bfloat16)
    weight[3, :group] = 0
    found = quantize(weight, bits, group)
    assert found.shape == weight.shape
    apart_by = (found.numbers() - weight).unflatten(1, (-1, group)).abs().amax(-1)
    steps = 0.5 if bits == 8 else 1.0
    assert (apart_by <= steps * found.scales.abs() * (1 + 1e-5)).all()
    assert torch.equal(found.numbers()[3, :group], torch.zeros(group))


def test_rows_of_a_quantized_weight_are_those_of_all() -> None:
    weight = random(70, 96, dtype=torch.float32)
    rows = torch.tensor([5, 2, 69])
    for bits in (8, 4):
        whole = quantize(weight, bits, 32)
        assert torch.equal(whole[rows].numbers(), whole.numbers()[rows])
        assert torch.equal(quantize(weight[rows], bits, 32).numbers(), whole.numbers()[rows])


def test_codes_take_as_many_bytes_as_they_have_bits() -> None:
    """With 32 bits for the scale of 32 inputs."""
    weight = random(96, 256, dtype=torch.bfloat16)
    for bits in (8, 4):
        layer = PackedLinear(quantize(weight, bits, 32), None, torch.bfloat16)
        assert layer.panels.num_bytes == 96 * 256 * (bits + 1) / 8


@pytest.mark.parametrize(
    ("scales", "minima", "codebook"),
    [((3, 2), None, None), ((4, 3), None, None), ((4, 0), None, None), ((4, 2), (4, 1), None),
     ((4, 2), None, (8,))],
    ids=str,
)  # fmt: skip
def test_quantized_weight_of_unlike_parts_is_refused(scales, minima, codebook) -> None:
    """The kernels would read beyond their ends."""
    codes = torch.zeros(4, 8, dtype=torch.int8 if codebook is None else torch.uint8)
    given = (None if shape is None else torch.ones(shape) for shape in (minima, codebook))
    with pytest.raises(ValueError, match=r"\[[48](, \d)?\]|\[3, 2\]"):
        QuantizedWeight(codes, torch.ones(scales), *given)


@EACH_FORMAT
def test_rows_of_another_width_are_refused(name: str) -> None:
    dtype, make = FORMATS[name]
    layer = PackedLinear(make(5, 16), None, dtype)
    with pytest.raises(ValueError, match="rows have 8 inputs; the weight has 16"):
        layer(torch.ones(2, 8, dtype=dtype))


@EACH_FORMAT
def test_layer_writes_to_strided_rows_alone(name: str) -> None:
    dtype, make = FORMATS[name]
    layer, x = PackedLinear(make(40, 16), None, dtype), random(15, 16, dtype=dtype)
    wide = torch.full((15, 50), torch.nan, dtype=dtype)
    assert torch.equal(layer.write(x, wide[:, 5:45]), layer(x))
    assert wide[:, :5].isnan().all()
    assert wide[:, 45:].isnan().all()


def test_groups_that_units_do_not_divide_are_refused() -> None:
    weight = QuantizedWeight(torch.zeros(4, 12, dtype=torch.int8), torch.ones(4, 2))
    with pytest.raises(ValueError, match="2 inputs of a group are no multiple of 4"):
        PackedLinear(weight, None, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 2**18, 2**18 + 3])
def test_huge_pages_hold_what_is_written(num_rows):
    """As long as the tensor, or a view of it, is there."""
    part = huge_pages.empty(num_rows, 4, dtype=torch.float32).fill_(7)[:1]
    others = [huge_pages.empty(2**18, 4, dtype=torch.float32).fill_(0) for _ in range(3)]
    assert part.tolist() == [[7.0] * 4]
    assert all(not other.any() for other in others)
