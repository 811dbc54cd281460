"""Whole blocks from anywhere to anywhere, bit by bit."""

import pytest
import torch

from baton_kernels.block_copy import copy_blocks, reference_copy_blocks
from tests.support.kernels.comparison import each_case, pairwise


def pool_of(num_blocks: int, block_bytes: int, gap: int = 0) -> torch.Tensor:
    wide = torch.randint(256, (num_blocks, block_bytes + gap), dtype=torch.uint8)
    return wide[:, :block_bytes]


@each_case(
    pairwise(
        block_bytes=(16, 48, 4096, 16384, 16400, 40000),
        num_pairs=(1, 2, 7),
        is_same_pool=(False, True),
        gap=(0, 16),
    )
)
def test_copy_blocks_copies_whole_blocks_and_no_others(case: dict) -> None:
    source = pool_of(20, case["block_bytes"], case["gap"])
    target = source if case["is_same_pool"] else pool_of(15, case["block_bytes"])
    ids = torch.randperm(15)[: 2 * case["num_pairs"]]
    pairs = torch.stack([ids[: len(ids) // 2], ids[len(ids) // 2 :]], dim=1)
    expected, untouched = target.clone(), source.clone()
    reference_copy_blocks(source.clone(), expected, pairs)
    copy_blocks(source, target, pairs)
    assert torch.equal(target, expected)
    assert case["is_same_pool"] or torch.equal(source, untouched)


def test_copy_blocks_launches_nothing_without_pairs() -> None:
    pool = pool_of(2, 16)
    copy_blocks(pool, pool, torch.empty(0, 2, dtype=torch.int64))


def test_copy_blocks_refuses_wrong_shape_or_dtype() -> None:
    pool, pairs = pool_of(4, 32), torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match=r"target has shape \(4, 16\); must have \(4, 32\)"):
        copy_blocks(pool, pool_of(4, 16), pairs)
    with pytest.raises(
        ValueError, match="source has a block_bytes of 24; must be a multiple of 16"
    ):
        copy_blocks(pool_of(4, 24), pool_of(4, 24), pairs)
    with pytest.raises(ValueError, match="pairs is int32; must be int64"):
        copy_blocks(pool, pool, pairs.int())
