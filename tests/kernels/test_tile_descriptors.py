"""Choice of TMA descriptors for the tiles of prefill."""

import pytest
import torch

from baton_kernels.attention.tile_descriptors import TileDescriptors, describe_tiles
from baton_kernels.attention.tiling import choose_tiling
from baton_kernels.gpu import GPUS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def describe(
    block_size: int = 64,
    head_dim: int = 128,
    dtype: torch.dtype = BF16,
    capability: int = 90,
    offset: int = 0,
    gap: int = 0,
) -> TileDescriptors | None:
    """Those of a pool of 3 blocks and 2 heads, `offset` numbers into its memory and with so many
    as `gap` between blocks."""
    gpu = GPUS[capability]
    query = dtype if dtype != FP8 else BF16
    tiling = choose_tiling(head_dim, query, dtype, 2, gpu).prefill
    width = 2 * 2 * block_size * head_dim + gap
    pool = torch.zeros(offset + 3 * width, dtype=torch.float32).to(dtype)[offset:].view(3, width)
    parts = pool[:, : width - gap].unflatten(1, (2, 2, block_size, head_dim))
    return describe_tiles(parts[:, :, 0], parts[:, :, 1], tiling, gpu)


def test_describe_tiles_needs_gpu_with_tma() -> None:
    chosen = {capability: describe(capability=capability) is not None for capability in GPUS}
    assert chosen == {80: False, 86: False, 89: False, 90: True, 100: True, 120: True}


@pytest.mark.parametrize(
    ("head_dim", "fitting"), [(64, {128, 256}), (80, {64, 128, 256}), (256, {32, 64, 128, 256})]
)
def test_describe_tiles_needs_blocks_of_whole_tiles(head_dim: int, fitting: set[int]) -> None:
    sizes = (16, 32, 48, 64, 96, 128, 256)
    found = {size for size in sizes if describe(size, head_dim) is not None}
    assert found == fitting | ({96} if head_dim == 256 else set())


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP8])
def test_describe_tiles_needs_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    aligned = 16 // dtype.itemsize
    assert describe(dtype=dtype, offset=aligned, gap=aligned) is not None
    assert describe(dtype=dtype, offset=aligned // 2) is None
    assert describe(dtype=dtype, gap=aligned // 2) is None


def test_describe_tiles_leaves_float32_to_pointers() -> None:
    assert describe(256, dtype=torch.float32) is None


def test_descriptors_have_boxes_of_one_tile() -> None:
    found = describe(128, head_dim=80)
    assert found is not None
    assert found.tile_keys == 64
    for each in (found.keys, found.values):
        assert list(each.shape) == [3, 2, 128, 80]
        assert each.block_shape == [1, 1, 64, 128]
    assert found.keys.base.data_ptr() < found.values.base.data_ptr()
