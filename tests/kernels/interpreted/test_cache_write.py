"""K and V into the pool, with and without the rotary embedding, against float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton_kernels.rows.cache_write import CacheBlocks, reference_write_kv, write_kv
from baton_kernels.rows.rotary import Rotation, reference_rotate, rotate_and_write
from tests.support.kernels.cache_cases import Step, check_rotation, rotary_table, step_of
from tests.support.kernels.comparison import FLOATS, FP8, assert_close, each_case, pairwise
from tests.support.kernels.interpreter import IS_INTERPRETED

HEAD_DIMS = (64, 80, 96, 128, 256)
CASES = pairwise(
    num_tokens=(1, 2, 19),
    num_kv_heads=(1, 2, 3, 10),
    key_dim=HEAD_DIMS,
    dtype=FLOATS,
    cache_dtype=("same", torch.bfloat16, FP8),
    block_size=(16, 4),
    layer=(0, 2),
)
MAX_LEN = 500


def step(case: dict[str, Any], **changes: Any) -> Step:
    case = {"value_dim": case["key_dim"], **case, **changes}
    if case["cache_dtype"] == "same":
        case["cache_dtype"] = case["dtype"]
    return step_of(**case)


@each_case(CASES)
def test_write_kv_writes_only_slots_of_tokens(case: dict) -> None:
    new = step(case)
    write_kv(new.key, new.value, new.cache, new.slots)
    new.check()


def test_write_kv_takes_keys_and_values_of_different_sizes() -> None:
    new = step(CASES[0], key_dim=96, value_dim=64, num_tokens=7)
    write_kv(new.key, new.value, new.cache, new.slots)
    new.check()


def test_write_kv_saturates_values_beyond_fp8() -> None:
    new = step(CASES[0], cache_dtype=FP8, num_tokens=1, layer=0)
    write_kv(new.key.sign() * 1e6, new.value, new.cache, new.slots)
    largest = 448 * new.cache.key_scales.double()[:, None]
    assert torch.equal(new.written()[0], new.key.sign().double() * largest)


Write = Callable[[Step], object]


def rotate(new: Step) -> None:
    num_tokens, _, head_dim = new.key.shape
    query, positions = torch.zeros(num_tokens, 4, head_dim), torch.zeros(num_tokens).int()
    table = rotary_table(1, head_dim // 2)  # turns none at position 0
    rotate_and_write(
        query.to(new.key.dtype),
        new.key,
        new.value,
        positions,
        Rotation(table),
        new.cache,
        new.slots,
    )


WRITES: dict[str, Write] = {
    "write_kv": lambda new: write_kv(new.key, new.value, new.cache, new.slots),
    "reference": lambda new: reference_write_kv(new.key, new.value, new.cache, new.slots),
    "rotate_and_write": rotate,
}


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("name", WRITES)
def test_cache_writes_break_keys_of_broken_values(name: str, cache_dtype: torch.dtype) -> None:
    """So that attention, which leaves out hidden keys, leaves them out with their values."""
    new = step(
        CASES[0], num_tokens=2, num_kv_heads=10, key_dim=80, value_dim=80, dtype=torch.bfloat16,
        cache_dtype=cache_dtype, layer=0,
    )  # fmt: skip
    whole = new.written_by(WRITES[name])
    for head, number in ((3, torch.nan), (8, -torch.inf), (9, torch.inf)):
        new.value[1, head, 79] = number
    keys, values = new.written_by(WRITES[name])
    is_broken = torch.zeros(2, 10, dtype=torch.bool)
    is_broken[1, [3, 8, 9]] = True
    if cache_dtype != FP8 or not IS_INTERPRETED:  # which stores another number in fp8
        assert torch.equal(keys.isnan().any(-1), is_broken)
    assert torch.equal(keys[~is_broken], whole[0][~is_broken])
    assert not values[is_broken][:, 79].any()
    assert torch.equal(values[..., :79], whole[1][..., :79])
    assert torch.equal(values[~is_broken], whole[1][~is_broken])


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
def test_reference_write_kv_writes_only_slots_of_tokens(cache_dtype: torch.dtype) -> None:
    new = step(CASES[0], cache_dtype=cache_dtype, num_tokens=9)
    reference_write_kv(new.key, new.value, new.cache, new.slots)
    new.check()


ROTARY_CASES = pairwise(
    num_tokens=(1, 2, 7),
    num_kv_heads=(1, 3, 10),
    queries_per_head=(1, 4, 16),
    key_dim=HEAD_DIMS,
    rotary_dim=("all", 2, 32, 48),
    is_adjacent=(False, True),
    has_norm=(False, True),
    dtype=FLOATS,
    cache_dtype=("same", torch.bfloat16, FP8),
    out=("allocated", "given", "in place"),
    block_size=(16, 4),
    layer=(0, 1),
)


@each_case(ROTARY_CASES, num_quick=12)
def test_rotate_and_write_rotates_and_fills_cache(case: dict) -> None:
    of_step = dict(case)
    per_head, size, is_adjacent, has_norm, out = (
        of_step.pop(name)
        for name in ("queries_per_head", "rotary_dim", "is_adjacent", "has_norm", "out")
    )
    table = rotary_table(MAX_LEN, case["key_dim"] if size == "all" else size)
    num_heads = per_head * case["num_kv_heads"]
    check_rotation(step(of_step), num_heads, Rotation(table, is_adjacent), has_norm, out)


def test_rotate_and_write_takes_slices_of_fused_projection() -> None:
    new = step(
        CASES[0],
        num_tokens=4, num_kv_heads=2, key_dim=64, value_dim=64, dtype=torch.float32,
        cache_dtype=torch.float32,
    )  # fmt: skip
    heads = torch.randn(4, 8 + 2 + 2, 64)
    query, key, value = heads.split([8, 2, 2], dim=1)
    rotation, positions = Rotation(rotary_table(9, 64)), torch.tensor([8, 0, 3, 3])
    expected = reference_rotate(heads.double(), positions, rotation)
    rotate_and_write(query, key, value, positions, rotation, new.cache, new.slots, query_out=query)
    assert_close(heads[:, :8], expected[:, :8])
    replace(new, value=value).check(expected[:, 8:10])


def test_cache_writes_refuse_wrong_shapes() -> None:
    new = step(CASES[0], num_kv_heads=2, key_dim=64, value_dim=64)
    key, value, cache, slots = new.key, new.value, new.cache, new.slots
    with pytest.raises(ValueError, match=r"slots has shape"):
        write_kv(key, value, cache, slots[:0])
    with pytest.raises(ValueError, match=r"cache.key has shape .* since key has 2 heads of 60"):
        write_kv(key[..., :60].contiguous(), value, cache, slots)
    with pytest.raises(ValueError, match="an fp8 cache needs a scale for each KV head"):
        write_kv(key, value, CacheBlocks(cache.key.to(FP8), cache.value.to(FP8)), slots)
    with pytest.raises(ValueError, match=r"keys have strides .* both must be views of one pool"):
        write_kv(key, value, replace(cache, value=cache.value.contiguous()), slots)
    rotation = Rotation(rotary_table(9, 66))
    with pytest.raises(ValueError, match="rotary_dim of at most the head size, 64"):
        rotate_and_write(key, key, value, slots, rotation, cache, slots)


def test_write_kv_never_writes_null_block() -> None:
    new = step(CASES[0], num_tokens=16, block_size=16)
    write_kv(new.key, new.value, new.cache, torch.arange(16))
    assert new.pool.content.eq(0xFF).all()
