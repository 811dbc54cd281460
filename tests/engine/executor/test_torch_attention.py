"""Paged attention in torch against a dense reference."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.attention.torch_attention import TorchAttention, TorchBatch
from baton.engine.executor.cache.kv_layout import KvShape, LayerPlace, plan_layout
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.cache.kv_scales import FP8, KvScales
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from tests.support.engine.paged_attention import (
    CPU,
    RAGGED,
    SCALE,
    TOLERANCE,
    Broken,
    Heads,
    check,
    ragged_batch,
    schedules,
)
from tests.support.kernels.pending_prefix import check_pending_prefix

RULES = {
    "full": LayerAttention(SCALE, MaskRule()),
    "windowed": LayerAttention(SCALE, MaskRule(3)),
    "capped": LayerAttention(SCALE, MaskRule(), 1.5),
    "sinks": LayerAttention(SCALE, MaskRule(5), None, torch.linspace(-1, 1, 4)),
}


NUMBERS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"scales": KvScales(torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.7]))},
}


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_attention_reads_what_the_step_writes(window, order):
    """The fence: all of a layer's K and V are written before any query is attended."""
    check_pending_prefix(TorchAttention, window, order)


def test_attention_ignores_stale_block_content():
    check(TorchAttention, Heads(), LayerAttention(SCALE, MaskRule()), RAGGED, old_content=math.nan)


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("layer", RULES.values(), ids=RULES)
@pytest.mark.parametrize("how", NUMBERS.values(), ids=NUMBERS)
def test_attention_keeps_broken_keys_from_others(layer, part, number, how):
    """In rows that do not see it: earlier ones of its chunk, later ones beyond a window, and other
    sequences."""
    broken = {s: Broken(p, part, number) for s, p in ((1, 3), (2, 6), (3, 8))}
    check(TorchAttention, Heads(), layer, RAGGED, broken=broken, **how)


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_in_reduced_precision_stays_close(sinks):
    logits = torch.linspace(-1, 1, 4).bfloat16() if sinks else None
    layer = LayerAttention(SCALE, MaskRule(6), None, logits)
    check(TorchAttention, Heads(), layer, RAGGED, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads",
    [Heads(), Heads(num_kv_heads=3, per_kv=4), Heads(key_dim=6, value_dim=10)],
    ids=["plain", "grouped", "unequal"],
)
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (5, 0.7, False), (3, None, True)]
)
def test_attention_dequantizes_an_fp8_cache(heads, dtype, window, softcap, has_sinks):
    scales = KvScales(torch.rand(heads.num_kv_heads) + 0.2, torch.rand(heads.num_kv_heads) + 0.2)
    sinks = torch.linspace(-2, 3, heads.num_heads).to(dtype) if has_sinks else None
    layer = LayerAttention(SCALE, MaskRule(window), softcap, sinks)
    check(
        TorchAttention,
        heads,
        layer,
        RAGGED,
        dtype=dtype,
        scales=scales,
        layers_before=(KvShape(3, 4, 9),),
    )


def test_attention_groups_decodes_of_unequal_lengths():
    lengths = [1200, 3, 40, 5, 1100, 1]
    layout = plan_layout([KvShape(1, 4, 4)], torch.float32, 4)
    table = np.tile(np.arange(1, 301, dtype=np.int32), (len(lengths), 1))
    batch = TorchBatch(
        ragged_batch([(i, n - 1, 1) for i, n in enumerate(lengths)], table), [layout], CPU
    )
    assert len(batch.cache_groups[0].groups) > 1
    steps = [[(i, n - 1) for i, n in enumerate(lengths) if n > 1], [(i, 1) for i in range(6)]]
    heads = Heads(num_kv_heads=1, per_kv=1, key_dim=4, value_dim=4)
    check(TorchAttention, heads, LayerAttention(SCALE, MaskRule()), steps)


@pytest.mark.parametrize("broken", [(), (2,), range(6)], ids=["none", "one", "prefix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_cascade_equals_attention_over_copies_of_the_prefix(dtype, broken):
    """Six decodes share 64 blocks; a seventh begins otherwise, and so does a short one. What comes
    after the tokens of the six is not finite, and neither is a key of one of them, or of all."""
    heads, size, num_shared = Heads(key_dim=64, value_dim=64), 16, 64
    starts = np.array([1024 + 5 * i for i in range(6)] + [1030, 7], np.int64)
    blocks = iter(range(1, 2000))
    prefix = [next(blocks) for _ in range(num_shared)]
    own = [[next(blocks) for _ in range(2)] for _ in starts]
    copies = [[next(blocks) for _ in range(num_shared)] for _ in starts]
    pool = KvPool(plan_layout([heads.shape], dtype, size), next(blocks), CPU)
    generator = torch.Generator().manual_seed(1)
    (cache,) = pool.layers
    for content in (cache.keys, cache.values):
        content[1:].copy_(torch.randn(content[1:].shape, generator=generator))
        for copy in copies:
            content[copy] = content[prefix]
        for start, (first, second) in zip(starts[:6], own, strict=False):
            begin = start + 1 - num_shared * size
            content[first, :, begin:] = content[second, :, max(0, begin - size) :] = math.nan
    if len(broken) == 1:
        cache.keys[own[broken[0]][0], :, 0] = math.nan
    elif broken:
        cache.keys[[prefix[9], *(copies[i][9] for i in broken)], :, 3] = math.nan
    tables = [
        np.array([(prefix if shares and i < 6 else copies[i]) + own[i] for i in range(8)], np.int32)
        for shares in (True, False)
    ]
    scales = KvScales(torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.7])) if dtype is FP8 else None
    places = [LayerPlace(0, 0)]
    attention = TorchAttention(KvCache([pool], [], places, None if scales is None else [scales]))
    computed = torch.float32 if dtype is FP8 else dtype
    query, key, value = (
        torch.randn(8, number, 64, generator=generator).to(computed)
        for number in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    layer = LayerAttention(0.125, MaskRule())
    outs = []
    for table, is_shared in zip(tables, (True, False), strict=True):
        ragged = RaggedBatch.of_decodes(np.arange(8), starts, [table])
        batch = attention.prepare(ragged)
        table.fill(NULL_BLOCK)  # the scheduler changes it before the step is computed
        assert (batch.cache_groups[0].cascade is not None) == is_shared
        outs.append(attention.forward(0, layer, query, key, value, batch).float())
    tolerance = TOLERANCE[computed]
    is_broken = [bool(row.isnan().any()) for row in outs[0]]
    assert is_broken == [i in broken for i in range(8)]
    torch.testing.assert_close(*outs, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_cascade_is_left_out_where_a_layer_cannot_merge():
    layout = plan_layout([KvShape(2, 64, 64)], torch.float32, 16)
    table = np.tile(np.arange(1, 101, dtype=np.int32), (8, 1))
    ragged = RaggedBatch.of_decodes(np.arange(8), np.full(8, 1500), [table])
    pool = KvPool(layout, 100, CPU)
    pool.layers[0].keys[1:].normal_()
    pool.layers[0].values[1:].normal_()
    attention = TorchAttention(KvCache([pool], [], [LayerPlace(0, 0)]))
    batch = attention.prepare(ragged)
    assert batch.cache_groups[0].cascade is not None
    query, key = torch.randn(8, 4, 64), torch.randn(8, 2, 64)
    capped = LayerAttention(0.125, MaskRule(), softcap=1e6)
    plain = LayerAttention(0.125, MaskRule())
    outs = [attention.forward(0, layer, query, key, key, batch) for layer in (capped, plain)]
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-4)


@given(
    schedules(),
    st.builds(Heads, st.integers(1, 3), st.integers(1, 8), st.integers(1, 24), st.integers(1, 16)),
    st.integers(1, 16),
    st.none() | st.integers(1, 20),
    st.none() | st.sampled_from([0.7, 1.5, 30.0]),
    st.booleans(),
    st.sampled_from([(), (KvShape(1, 5, 5),), (KvShape(3, 4, 9), KvShape(2, 8, 8))]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_attention_equals_the_reference_on_random_schedules(
    steps, heads, block_size, window, softcap, sinks, before, seed
):
    logits = torch.linspace(-1, 2, heads.num_heads) if sinks else None
    layer = LayerAttention(1 / math.sqrt(heads.key_dim), MaskRule(window), softcap, logits)
    check(
        TorchAttention, heads, layer, steps, block_size=block_size, layers_before=before, seed=seed
    )
