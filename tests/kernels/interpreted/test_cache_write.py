"""K and V into the pool, with and without the rotary embedding, against float64."""

import pytest
import torch

from baton.engine.kv_pool import KvPool
from kernels.cache_write import CacheBlocks, reference_write_kv, write_kv
from kernels.rotary import HeadNorms, Rotation, reference_rotate, rotate_and_write
from tests.support.kernels.cache_cases import assert_stored, rotary_table, step_of
from tests.support.kernels.comparison import FLOATS, FP8, assert_close, pairwise, poisoned, random

CPU = torch.device("cpu")
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


def prepared(case: dict) -> dict:
    cache_dtype = case["dtype"] if case["cache_dtype"] == "same" else case["cache_dtype"]
    return {"value_dim": case["key_dim"], **case, "cache_dtype": cache_dtype, "device": CPU}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_written_to_their_slots_and_nothing_else_is(case: dict) -> None:
    step = step_of(**prepared(case))
    write_kv(step.key, step.value, step.cache, step.slots)
    for found, rows in zip(step.written(), (step.key, step.value), strict=True):
        assert_stored(found, rows[step.is_real].double(), step.cache.key.dtype)
    assert step.num_numbers() == sum(t[step.is_real].numel() for t in (step.key, step.value))


def test_keys_and_values_may_be_of_different_sizes() -> None:
    case = prepared(CASES[0]) | {"key_dim": 96, "value_dim": 64, "num_tokens": 7}
    step = step_of(**case)
    write_kv(step.key, step.value, step.cache, step.slots)
    for found, rows in zip(step.written(), (step.key, step.value), strict=True):
        assert_stored(found, rows[step.is_real].double(), step.cache.key.dtype)


def test_what_fp8_cannot_hold_becomes_its_largest_number() -> None:
    step = step_of(**prepared(CASES[0]) | {"cache_dtype": FP8, "num_tokens": 1, "layer": 0})
    write_kv(step.key.sign() * 1e6, step.value, step.cache, step.slots)
    largest = 448 * step.cache.key_scales.double()[:, None]
    assert torch.equal(step.written()[0], step.key.sign().double() * largest)


@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
def test_the_reference_writes_the_same(cache_dtype: torch.dtype) -> None:
    step = step_of(**prepared(CASES[0]) | {"cache_dtype": cache_dtype, "num_tokens": 9})
    reference_write_kv(step.key, step.value, step.cache, step.slots)
    for found, rows in zip(step.written(), (step.key, step.value), strict=True):
        assert_stored(found, rows[step.is_real].double(), cache_dtype)


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
OF_STEP = ("num_tokens", "num_kv_heads", "key_dim", "dtype", "cache_dtype", "block_size", "layer")


def rotate(case: dict) -> None:
    step = step_of(**prepared({name: case[name] for name in OF_STEP}))
    head_dim, dtype = case["key_dim"], case["dtype"]
    num_heads = case["queries_per_head"] * case["num_kv_heads"]
    query = random(case["num_tokens"], num_heads, head_dim, dtype=dtype, device=CPU)
    given = query.clone()
    out = {
        "allocated": None,
        "given": poisoned(*query.shape, dtype=dtype, device=CPU),
        "in place": given,
    }[case["out"]]
    rotary_dim = head_dim if case["rotary_dim"] == "all" else case["rotary_dim"]
    rotation = Rotation(rotary_table(MAX_LEN, rotary_dim, CPU), case["is_adjacent"])
    positions = torch.randint(MAX_LEN, (case["num_tokens"],))
    norms = HeadNorms(*torch.randn(2, head_dim).to(dtype), 1e-5) if case["has_norm"] else None
    rotated = rotate_and_write(
        given, step.key, step.value, positions, rotation, step.cache, step.slots, norms, out
    )
    assert out is None or rotated is out
    weights = (norms.query.double(), norms.key.double(), norms.eps) if norms else (None, None, 0.0)
    expected = reference_rotate(query.double(), positions, rotation, weights[0], weights[2])
    assert_close(rotated, expected)
    key, value = step.written()
    expected = reference_rotate(step.key.double(), positions, rotation, weights[1], weights[2])
    assert_stored(key, expected[step.is_real], step.cache.key.dtype)
    assert_stored(value, step.value[step.is_real].double(), step.cache.key.dtype)
    assert step.num_numbers() == sum(t[step.is_real].numel() for t in (step.key, step.value))


@pytest.mark.parametrize("case", ROTARY_CASES[:12], ids=str)
def test_queries_and_keys_are_rotated_and_the_cache_is_written(case: dict) -> None:
    rotate(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ROTARY_CASES[12:], ids=str)
def test_queries_and_keys_are_rotated_in_every_pair_of_shapes(case: dict) -> None:
    rotate(case)


def test_slices_of_a_fused_projection_need_no_copy() -> None:
    shape = {"num_tokens": 4, "num_kv_heads": 2, "key_dim": 64, "value_dim": 64}
    types = {"dtype": torch.float32, "cache_dtype": torch.float32}
    step = step_of(**prepared(CASES[0]) | shape | types)
    heads = torch.randn(4, 8 + 2 + 2, 64)
    query, key, value = heads.split([8, 2, 2], dim=1)
    rotation, positions = Rotation(rotary_table(9, 64, CPU)), torch.tensor([8, 0, 3, 3])
    expected = reference_rotate(heads.double(), positions, rotation)
    rotate_and_write(
        query, key, value, positions, rotation, step.cache, step.slots, query_out=query
    )
    assert_close(heads[:, :8], expected[:, :8])
    assert_stored(step.written()[0], expected[:, 8:10][step.is_real], torch.float32)


def test_what_does_not_fit_is_named() -> None:
    step = step_of(**prepared(CASES[0]) | {"num_kv_heads": 2, "key_dim": 64, "value_dim": 64})
    key, value, cache, slots = step.key, step.value, step.cache, step.slots
    with pytest.raises(ValueError, match=r"slots has shape"):
        write_kv(key, value, cache, slots[:0])
    with pytest.raises(ValueError, match=r"cache.key has shape .* since key has 2 heads of 60"):
        write_kv(key[..., :60].contiguous(), value, cache, slots)
    with pytest.raises(ValueError, match="an fp8 cache needs a scale for each KV head"):
        write_kv(key, value, CacheBlocks(cache.key.to(FP8), cache.value.to(FP8)), slots)
    rotation = Rotation(rotary_table(9, 66, CPU))
    with pytest.raises(ValueError, match="rotary_dim of at most the head size, 64"):
        rotate_and_write(key, key, value, slots, rotation, cache, slots)


def test_the_null_block_is_never_written() -> None:
    step = step_of(**prepared(CASES[0]) | {"num_tokens": 16, "block_size": 16})
    pool: KvPool = step.pool
    slots = torch.arange(16)
    write_kv(step.key, step.value, step.cache, slots)
    assert pool._bytes.eq(0xFF).all()
