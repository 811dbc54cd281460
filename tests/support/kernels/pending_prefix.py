"""One step in which a sequence continues from blocks that another one computes in it."""

from collections.abc import Callable

import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, LayerAttention, RaggedBatch
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool

SHAPE = KvShape(2, 64, 64)
NUM_HEADS = 4
BLOCK_SIZE = 16
# The second sequence shares the first two blocks of the first, and computes what follows them.
TABLE = np.array([[1, 2, 3], [1, 2, 4]], np.int32)
RANGES = {0: (0, 40), 1: (32, 37)}


def check_pending_prefix(
    attention_of: Callable[[KvCache], Attention], window: int | None, order: tuple[int, int]
) -> None:
    """Asserts that both get the same in one step, in this order, as in two."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        s: [
            torch.randn(end - start, num, 64, generator=generator)
            for num in (NUM_HEADS, SHAPE.num_kv_heads, SHAPE.num_kv_heads)
        ]
        for s, (start, end) in RANGES.items()
    }

    def outputs(*steps: tuple[int, ...]) -> dict[int, torch.Tensor]:
        layouts, places = plan_groups([SHAPE], [window], torch.float32, BLOCK_SIZE)
        attention = attention_of(KvCache([KvPool(layouts[0], 4, torch.device("cpu"))], [], places))
        found: dict[int, torch.Tensor] = {}
        for step in steps:
            starts, ends = np.array([RANGES[s] for s in step]).T
            batch = attention.prepare(
                RaggedBatch(np.array(step), starts, ends - starts, 0, [TABLE])
            )
            query, key, value = (
                torch.cat(column) for column in zip(*(tensors[s] for s in step), strict=True)
            )
            layer = LayerAttention(0.125, MaskRule(window))
            out = attention.forward(0, layer, query, key, value, batch)
            found |= dict(zip(step, out.split((ends - starts).tolist()), strict=True))
        return found

    together, apart = outputs(order), outputs((0,), (1,))
    for sequence in RANGES:
        torch.testing.assert_close(together[sequence], apart[sequence], rtol=1e-5, atol=1e-5)
