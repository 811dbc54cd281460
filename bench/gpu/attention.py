"""Attention over all layers of one pool, as in a model: every layer finds its K and V uncached, and
a recorded graph launches the kernels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.engine.executor.attention.interface import LayerAttention, RaggedBatch
from baton.engine.executor.attention.library_attention import LibraryAttention
from baton.engine.executor.attention.library_choice import LIBRARIES, LibraryModel
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from bench.gpu.sizes import AttentionShape

Step = Callable[[], torch.Tensor]

# K and V of the library's layers take at most so much; layers share them beyond that.
_LIBRARY_BYTES = 4 * 2**30


class LayeredAttention:
    """Attention of all layers over one pool of random K and V, by a `library` if it names one."""

    def __init__(
        self,
        shape: AttentionShape,
        num_tokens: int,
        max_context: int,
        device: str,
        library: str | None = None,
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.num_blocks = -(-num_tokens // shape.block_size)
        layers = [KvShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)] * shape.num_layers
        layouts, places = plan_groups(layers, [None] * len(layers), shape.dtype, shape.block_size)
        pool = KvPool(layouts[0], self.num_blocks, self.device)
        pool.content.view(shape.dtype)[1:].normal_()
        self.cache = KvCache([pool], [], places)
        self.rule = LayerAttention(shape.head_dim**-0.5, MaskRule())
        ours = TritonAttention(
            self.cache,
            [shape.num_heads] * shape.num_layers,
            shape.dtype,
            max_context,
            deterministic=False,
        )
        self.attention: TritonAttention | LibraryAttention = ours
        if library is not None:
            kernels = LIBRARIES[library].kernels(ours.device, shape.dtype)
            rules = [self.rule] * shape.num_layers
            self.attention = LibraryAttention(ours, rules, pool.layers, kernels)

    def step(self, ragged: RaggedBatch) -> Step:
        """Returns a function that attends in all layers, and returns the output of the last."""
        batch: Any = self.attention.prepare(ragged)
        shape = self.shape
        query = torch.randn(
            len(batch.positions), shape.num_heads, shape.head_dim,
            dtype=shape.dtype, device=self.device,
        )  # fmt: skip

        def attend() -> torch.Tensor:
            for index in range(shape.num_layers):
                out = self.attention.attend(index, self.rule, query, batch)
            return out

        return attend


def decodes(
    shape: AttentionShape, contexts: Sequence[int], device: str, library: str | None = None
) -> Step:
    """Returns a step of decodes with these contexts, their blocks scattered over the pool."""
    counts = [-(-context // shape.block_size) for context in contexts]
    num_tokens = sum(counts) * shape.block_size
    layers = LayeredAttention(shape, num_tokens, max(contexts), device, library)
    table = np.zeros((len(contexts), max(counts)), np.int32)
    block_ids = 1 + np.random.default_rng(0).permutation(layers.num_blocks).astype(np.int32)
    taken = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = block_ids[taken : taken + count]
        taken += count
    slots, starts = np.arange(len(contexts)), np.array(contexts) - 1
    return layers.step(RaggedBatch.of_decodes(slots, starts, [table]))


def prompt(shape: AttentionShape, length: int, device: str, library: str | None = None) -> Step:
    """Returns a step of one prompt."""
    layers = LayeredAttention(shape, length, length, device, library)
    return layers.step(prompt_batch(length, layers.num_blocks))


def gathered_prompt(shape: AttentionShape, length: int, device: str) -> Step:
    """Returns the same by our kernels, which gather all tiles of K and V by pointers."""
    layers = LayeredAttention(shape, length, length, device)
    attention = layers.attention
    assert isinstance(attention, TritonAttention)
    attention.paged = [replace(kv, descriptors=None) for kv in attention.paged]
    return layers.step(prompt_batch(length, layers.num_blocks))


def libraries(shape: AttentionShape, device: str) -> list[str]:
    """Returns the libraries that are installed and can attend."""
    layer = LayerAttention(shape.head_dim**-0.5, MaskRule())
    model = LibraryModel(
        shape.dtype, shape.dtype, frozenset({shape.head_dim}), [layer], deterministic=False
    )
    found = LIBRARIES.items()
    return [name for name, each in found if each.why_not(model, torch.device(device)) is None]


def prompt_batch(length: int, num_blocks: int) -> RaggedBatch:
    """Returns the batch of one prompt in all blocks of a pool."""
    one = np.ones(1, np.int64)
    table = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
    return RaggedBatch(0 * one, 0 * one, length * one, 0, [table])


def library_prompt(shape: AttentionShape, length: int, backend: SDPBackend, device: str) -> Step:
    """Returns the same by torch's library, over K and V repeated for each query head."""
    size = (1, shape.num_heads, length, shape.head_dim)
    options: dict[str, Any] = {"dtype": shape.dtype, "device": torch.device(device)}
    query = torch.randn(size, **options)
    num_different = max(1, min(shape.num_layers, _LIBRARY_BYTES // (2 * query.nbytes)))
    layers = [[torch.randn(size, **options) for _ in range(2)] for _ in range(num_different)]

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            for index in range(shape.num_layers):
                key, value = layers[index % num_different]
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out

    return attend
