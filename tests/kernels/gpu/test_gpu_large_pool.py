"""Pool whose last elements have indices beyond 32 bits."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from baton.engine.executor.attention.interface import RaggedBatch
from baton_kernels.rows.cache_write import write_kv
from bench.gpu.attention import LayeredAttention
from bench.gpu.sizes import AttentionShape

pytestmark = pytest.mark.gpu
SHAPE = AttentionShape()
LENGTH = 40


def test_last_block_of_a_large_pool_is_written_and_read(gpu: torch.device) -> None:
    check_last_block(gpu, num_tokens=2**31 * SHAPE.dtype.itemsize // SHAPE.token_bytes)


def check_last_block(device: torch.device, num_tokens: int) -> None:
    """Decodes a token whose K and V are written to the last block."""
    layers = LayeredAttention(SHAPE, num_tokens + SHAPE.block_size, LENGTH, str(device))
    attention, last = layers.attention, layers.num_blocks
    table = np.arange(last - 2, last + 1, dtype=np.int32)[None]
    ragged = RaggedBatch.of_decodes(np.zeros(1, np.int64), np.array([LENGTH - 1]), [table])
    batch: Any = attention.prepare(ragged)
    index = SHAPE.num_layers - 1
    sizes = (SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
    query, key, value = (
        torch.randn(1, size, SHAPE.head_dim, dtype=SHAPE.dtype, device=device) for size in sizes
    )
    write_kv(key, value, attention.blocks(index), attention.slots(index, batch))
    pool = attention.blocks(index)
    keys, values = (
        blocks[last - 2 :].transpose(0, 1).flatten(1, 2)[:, :LENGTH].float()  # [heads, LENGTH, dim]
        for blocks in (pool.key, pool.value)
    )
    assert torch.equal(keys[:, -1], key[0].float())
    assert torch.equal(values[:, -1], value[0].float())
    expected = F.scaled_dot_product_attention(
        query[0, :, None].float(), keys, values, enable_gqa=True
    )
    out = attention.attend(index, layers.rule, query, batch)
    torch.testing.assert_close(out[0].float(), expected[:, 0], atol=1e-2, rtol=1e-2)
