"""Prefixes that one sequence computes and another one reads in the same step."""

import pytest
import torch

from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.cache.kv_pool import KvCache
from tests.support.kernels.pending_prefix import NUM_HEADS, check_pending_prefix


def attention_of(cache: KvCache) -> TritonAttention:
    return TritonAttention(cache, [NUM_HEADS], torch.float32, 64, deterministic=False)


@pytest.mark.parametrize(("window", "order"), [(None, (1, 0)), (20, (0, 1))])
def test_triton_attention_reads_what_the_step_writes(window, order):
    check_pending_prefix(attention_of, window, order)
