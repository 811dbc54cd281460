"""Paged attention checked against a dense float64 reference that knows no blocks and no batches."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import hypothesis.strategies as st
import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, LayerAttention, RaggedBatch
from baton.engine.executor.cache.kv_layout import KvShape, LayerPlace, plan_layout
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.cache.kv_scales import FP8, KvScales
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from tests.support.engine.quantisation import rounded

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@dataclass
class Heads:
    """Shape of one layer's attention."""

    num_kv_heads: int = 2
    per_kv: int = 2
    key_dim: int = 8
    value_dim: int = 8

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.per_kv

    @property
    def shape(self) -> KvShape:
        return KvShape(self.num_kv_heads, self.key_dim, self.value_dim)


def dense(
    layer: LayerAttention,
    query: torch.Tensor,  # [context, num_heads, key_dim]
    key: torch.Tensor,  # [context, num_kv_heads, key_dim]
    value: torch.Tensor,  # [context, num_kv_heads, value_dim]
) -> torch.Tensor:
    """One sequence, one head and one query at a time, in float64."""
    context, num_heads = query.shape[:2]
    per_kv = num_heads // key.shape[1]
    out = torch.zeros(context, num_heads, value.shape[2], dtype=torch.float64)
    for head in range(num_heads):
        for position in range(context):
            first = 0 if layer.rule.window is None else max(0, position + 1 - layer.rule.window)
            keys = key[first : position + 1, head // per_kv].double()
            scores = keys @ query[position, head].double() * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * (scores / layer.softcap).tanh()
            weights = scores.exp()
            total = weights.sum()
            if layer.sinks is not None:
                total = total + layer.sinks[head].double().exp()
            values = value[first : position + 1, head // per_kv].double()
            out[position, head] = (weights / total) @ values
    return out


def ragged_batch(step: list[tuple[int, int, int]], table: np.ndarray) -> RaggedBatch:
    """The batch of (slot, start, number of tokens), in this order; the single tokens that lead it
    are plain decodes."""
    batch_slots, starts, counts = np.array(step, np.int64).T
    longer = np.flatnonzero(counts > 1)
    num_decodes = int(longer[0]) if len(longer) else len(step)
    return RaggedBatch(batch_slots, starts, counts, num_decodes, [table])


class Tables:
    """Block tables as the engine keeps them: blocks in no order, none before a window, and a block
    that is not yet full was cleared when its first tokens came."""

    def __init__(
        self, lengths: dict[int, int], pool: KvPool, *, has_lookahead: bool, seed: int
    ) -> None:
        self._pool = pool
        self._size = pool.layout.block_size
        shuffled = random.Random(seed)
        order = shuffled.sample(range(1, pool.num_blocks + 1), pool.num_blocks)
        batch_slots = shuffled.sample(range(len(lengths) + 2), len(lengths))
        self.slot_of = dict(zip(lengths, batch_slots, strict=True))
        self._blocks = {
            s: [order.pop() for _ in range(-(-n // self._size) + 1)] for s, n in lengths.items()
        }
        self._has_lookahead = has_lookahead
        self._num_held = dict.fromkeys(lengths, 0)
        width = max(map(len, self._blocks.values()))
        self.table = np.full((len(lengths) + 2, width), NULL_BLOCK, np.int32)

    def grow(self, sequence: int, start: int, end: int) -> None:
        """Covers [0, end), of which queries from `start` on see what their window lets them."""
        batch_slot, blocks = self.slot_of[sequence], self._blocks[sequence]
        window = self._pool.layout.window
        needed = -(-end // self._size)
        held = needed + self._has_lookahead
        self.table[batch_slot, :held] = blocks[:held]
        if window is not None:
            self.table[batch_slot, : max(0, start - window + 1) // self._size] = NULL_BLOCK
        if end % self._size and self._num_held[sequence] < needed:
            self._pool.clear_blocks([blocks[needed - 1]])
        self._num_held[sequence] = needed


@dataclass(frozen=True, slots=True)
class Broken:
    """A token whose `part`, "key" or "value", has a number that is not finite."""

    position: int
    part: str
    number: float

    def spoil(self, _query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        (key if self.part == "key" else value)[self.position, :, 0] = self.number


NONE_BROKEN: Mapping[int, Broken] = MappingProxyType({})


def check(
    attention_of: Callable[[KvCache], Attention],
    heads: Heads,
    layer: LayerAttention,
    steps: list[list[tuple[int, int]]],
    *,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    layers_before: tuple[KvShape, ...] = (),
    old_content: float = 50.0,
    scales: KvScales | None = None,
    seed: int = 0,
    broken: Mapping[int, Broken] = NONE_BROKEN,
) -> None:
    """Feeds sequences through the pool, step by step, and compares each query's result.

    Args:
        steps: each a list of (sequence, number of its tokens), in the order they lie in the batch.
        scales: of an fp8 cache; what it holds is what the reference attends over.
        broken: by sequence, a token whose K or V is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    totals: Counter[int] = Counter()
    for sequence, count in chain(*steps):
        totals[sequence] += count
    tensors = {s: _drawn(heads, length, dtype, generator) for s, length in totals.items()}
    for sequence, of_sequence in broken.items():
        of_sequence.spoil(*tensors[sequence])
    expected = {s: dense(layer, *seen(scales, *tensors[s])) for s in totals}
    # Blocks in no order, one more than needed, and old content everywhere.
    num_blocks = sum(-(-length // block_size) + 1 for length in totals.values()) + 1
    cache_dtype = dtype if scales is None else FP8
    layout = plan_layout([*layers_before, heads.shape], cache_dtype, block_size, layer.rule.window)
    pool = KvPool(layout, num_blocks, CPU)
    for blocks in _contents(pool):
        blocks[1:] = old_content * torch.randn(blocks[1:].shape, generator=generator)
    tables = Tables(totals, pool, has_lookahead=math.isfinite(old_content), seed=seed)
    of_layers = None if scales is None else [scales]
    paged = attention_of(KvCache([pool], [], [LayerPlace(0, len(layers_before))], of_layers))
    done = dict.fromkeys(totals, 0)
    for step in steps:
        ranges = [(s, done[s], done[s] + count) for s, count in step]
        done |= {sequence: end for sequence, _, end in ranges}
        out = _attend(paged, layer, ranges, tensors, tables)
        wanted = torch.cat([expected[s][start:end] for s, start, end in ranges])
        assert out.shape == wanted.shape
        tolerance, is_finite = TOLERANCE[dtype], wanted.isfinite().all(-1)
        assert torch.equal(out.isfinite().all(-1), is_finite), "not finite in other rows"
        torch.testing.assert_close(
            out[is_finite].double(), wanted[is_finite], rtol=tolerance, atol=tolerance
        )
    for blocks in _contents(pool):
        assert not blocks[NULL_BLOCK].float().any(), "the null block was written"


def _drawn(
    heads: Heads, length: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns random queries, K and V of one sequence."""
    shapes = (
        (length, heads.num_heads, heads.key_dim),
        (length, heads.num_kv_heads, heads.key_dim),
        (length, heads.num_kv_heads, heads.value_dim),
    )
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def _contents(pool: KvPool) -> list[torch.Tensor]:
    return [blocks for layer in pool.layers for blocks in (layer.keys, layer.values)]


def _attend(
    paged: Attention,
    layer: LayerAttention,
    ranges: list[tuple[int, int, int]],
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    tables: Tables,
) -> torch.Tensor:
    """Attends one step of ranges (sequence, start, end)."""
    for sequence_range in ranges:
        tables.grow(*sequence_range)
    spans = [(tables.slot_of[s], start, end - start) for s, start, end in ranges]
    parts = [[tensor[start:end] for tensor in tensors[s]] for s, start, end in ranges]
    table = tables.table.copy()
    batch = paged.prepare(ragged_batch(spans, table))
    table.fill(NULL_BLOCK)  # the scheduler changes it before the step is computed
    query, key, value = (torch.cat(column) for column in zip(*parts, strict=True))
    return paged.forward(0, layer, query, key, value, batch)


def seen(
    scales: KvScales | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, with K and V as an fp8 cache would hold them."""
    if scales is None:
        return query, key, value
    key, value = (
        rounded(x.float() / of_x[:, None]).double() * of_x[:, None]
        for x, of_x in ((key, scales.key), (value, scales.value))
    )
    return query, key, value


SCALE = 0.35
RAGGED = [
    [(0, 1), (1, 7), (2, 4)],
    [(0, 1), (1, 1), (2, 1), (3, 9)],
    [(3, 2), (0, 1), (4, 1), (2, 5), (1, 1)],
    [(4, 1), (3, 1), (2, 1), (1, 1), (0, 1)],
]


@st.composite
def schedules(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Steps in which some of up to five sequences advance, each in any order."""
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        chosen = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
        steps.append([(s, draw(st.sampled_from([1, 1, 1, 2, 5, 13]))) for s in chosen])
    return steps
