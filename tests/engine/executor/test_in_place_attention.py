"""Attention that reads blocks in place, against a dense reference and against itself in batches."""

import logging
import math
import struct
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from baton.engine.executor.attention.in_place_attention import (
    InPlaceAttention,
    InPlaceBatch,
    why_not_in_place,
)
from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.attention.torch_attention import TorchAttention, TorchBatch
from baton.engine.executor.backend import TorchBackend
from baton.engine.executor.cache.kv_layout import KvShape, LayerPlace, plan_layout
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.cache.kv_scales import FP8
from baton_kernels.cpu.library import Library
from tests.support.engine.in_place_attention import (
    attend_in_place,
    check_any_batch,
    two_sequence_cache,
)
from tests.support.engine.paged_attention import (
    CPU,
    RAGGED,
    SCALE,
    Broken,
    Heads,
    check,
    schedules,
)
from tests.support.kernels.pending_prefix import check_pending_prefix

pytestmark = pytest.mark.system  # a C compiler

PLAIN = LayerAttention(SCALE, MaskRule())
# A NaN whose lowest bits are set, as memory may hold one that no arithmetic has made.
PAYLOAD = struct.unpack("<f", struct.pack("<I", 0x7FC00001))[0]
DIMS = st.sampled_from([1, 5, 8, 16, 24, 32, 40, 64])


@given(
    schedules(),
    st.builds(Heads, st.integers(1, 3), st.integers(1, 8), DIMS, DIMS),
    st.integers(1, 16),
    st.none() | st.integers(1, 20),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([(), (KvShape(1, 5, 5),), (KvShape(3, 4, 9), KvShape(2, 8, 8))]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_in_place_attention_equals_the_reference(
    steps, heads, block_size, window, dtype, before, seed
):
    layer = LayerAttention(1 / math.sqrt(heads.key_dim), MaskRule(window))
    how = {"block_size": block_size, "dtype": dtype, "layers_before": before, "seed": seed}
    check(InPlaceAttention, heads, layer, steps, **how)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(1, 300))
def test_in_place_batch_divides_decodes_as_any_ranges(starts, rows_per_query):
    slots, starts = np.arange(len(starts)), np.array(starts, np.int64)
    tables = [np.zeros((len(slots), 64), np.int32)]
    decodes = RaggedBatch.of_decodes(slots, starts, tables)
    one, other = (InPlaceBatch(b, 1) for b in (decodes, replace(decodes, num_decodes=0)))
    items = (b.work(0, rows_per_query).items.tolist() for b in (one, other))
    assert next(items) == next(items)


@pytest.mark.parametrize("window", [None, 100])
def test_in_place_attention_crosses_tiles(window):
    steps = [[(0, 300), (1, 130)], [(0, 1), (1, 90)], [(0, 3), (1, 1)]]
    layer = LayerAttention(SCALE, MaskRule(window))
    check(InPlaceAttention, Heads(key_dim=32, value_dim=16), layer, steps, block_size=16)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_place_attention_reads_what_the_step_writes(window, order):
    check_pending_prefix(InPlaceAttention, window, order)


def test_in_place_attention_ignores_stale_block_content():
    check(InPlaceAttention, Heads(), PLAIN, RAGGED, old_content=math.nan)


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("number", [math.nan, math.inf, PAYLOAD])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dims", [5, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_attention_keeps_broken_keys_apart(dtype, dims, window, number, part):
    """From earlier tokens of a chunk and of drafts, and from those beyond a window."""
    layer = LayerAttention(SCALE, MaskRule(window))
    steps = [*RAGGED, [(5, 200)], [(5, 2)], [(5, 60), (4, 2)]]
    broken = {s: Broken(p, part, number) for s, p in ((1, 3), (2, 6), (3, 8), (4, 3), (5, 201))}
    heads = Heads(key_dim=dims, value_dim=dims)
    check(InPlaceAttention, heads, layer, steps, dtype=dtype, broken=broken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_attention_gives_nan_where_scores_are_nan(dtype):
    """As torch does: a broken computation must not look like an answer."""
    out = attend_in_place(two_sequence_cache(dtype), [(0, 0, 30)], spoilt=True)
    assert out[7].isnan().all()
    assert out[:7].isfinite().all()


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_attention_is_bitwise_equal_in_any_batch(dtype, window):
    check_any_batch(dtype, window)


def test_in_place_decodes_are_bitwise_equal_in_any_batch():
    cache = two_sequence_cache(torch.float32)
    attend_in_place(cache, [(0, 0, 199), (1, 0, 69)])
    both = attend_in_place(cache, [(1, 69, 1), (0, 199, 1)])
    assert torch.equal(both[1:], attend_in_place(cache, [(0, 199, 1)]))


def test_decodes_that_share_a_prefix_attend_in_a_cascade():
    shape = KvShape(2, 64, 64)
    pool = KvPool(plan_layout([shape], torch.float32, 16), 100, CPU)
    attention = InPlaceAttention(KvCache([pool], [], [LayerPlace(0, 0)]))
    table = np.tile(np.arange(1, 101, dtype=np.int32), (8, 1))
    shared = RaggedBatch.of_decodes(np.arange(8), np.full(8, 1500), [table])
    assert isinstance(attention.prepare(shared), TorchBatch)
    apart = RaggedBatch.of_decodes(np.arange(1), np.full(1, 1500), [table])
    assert not isinstance(attention.prepare(apart), TorchBatch)


@pytest.mark.parametrize(
    ("layer", "dtype", "why"),
    [
        (PLAIN, torch.float32, None),
        (PLAIN, torch.bfloat16, None),
        (PLAIN, torch.float16, "the KV cache is float16"),
        (PLAIN, FP8, "the KV cache is float8_e4m3fn"),
        (LayerAttention(SCALE, MaskRule(), softcap=1.0), torch.float32, "soft cap"),
        (LayerAttention(SCALE, MaskRule(), sinks=torch.zeros(4)), torch.float32, "sinks"),
    ],
)
def test_backend_uses_c_kernels_where_kernels_serve(layer, dtype, why):
    reason = why_not_in_place(two_sequence_cache(dtype), [layer])
    assert reason == why if why is None else why in str(reason)
    attention = TorchBackend([layer], uses_c_kernels=True).attention(two_sequence_cache(dtype))
    assert isinstance(attention, InPlaceAttention if why is None else TorchAttention)


def test_backend_falls_back_to_torch_without_a_library(caplog):
    missing = Library("missing", sources=("paged_attention.c",), flags=("-no-such-flag",))
    backend = TorchBackend([PLAIN], uses_c_kernels=True, library=missing)
    with caplog.at_level(logging.INFO):
        attention = backend.attention(two_sequence_cache(torch.float32))
    assert isinstance(attention, TorchAttention)
    assert "torch computes attention, over copies of blocks" in caplog.text
