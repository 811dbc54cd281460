"""Inputs of the attention kernels beside the queries, and their validation."""

import functools
from dataclasses import dataclass
from typing import Final

import torch

from baton_kernels.attention.tile_descriptors import TileDescriptors
from baton_kernels.launch import (
    FLOATS,
    check_dtype,
    check_fp8,
    check_packed,
    check_pool_views,
    check_shape,
)

HEAD_DIMS: Final = (64, 80, 96, 128, 256)
MAX_GROUP: Final = 16
_CACHE_DTYPES: Final = (*FLOATS, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class PagedKv:
    """Paged K and V of one layer, as strided views of the whole pool. Raises `ValueError` for those
    that no kernel supports.

    Attributes:
        keys, values: `[num_blocks, num_kv_heads, block_size, head_dim]`, blocks and heads strided
            alike. Block 0 is zero; block tables are padded with it.
        key_scales, value_scales: `[num_kv_heads]` in float32, by which stored fp8 numbers are
            multiplied. None: 1.
        descriptors: of the tiles of prefill, as `describe_tiles` made them of `keys` and `values`.
            None: prefill gathers them by pointers.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    descriptors: TileDescriptors | None = None

    def __post_init__(self) -> None:
        check_dtype("the KV cache", self.keys, *_CACHE_DTYPES)
        check_dtype("values", self.values, self.keys.dtype)
        check_fp8(self.keys)
        check_shape("values", self.values, tuple(self.keys.shape))
        check_pool_views(self.keys, self.values)
        for name, scales in (("key_scales", self.key_scales), ("value_scales", self.value_scales)):
            if scales is not None:
                check_shape(name, scales, (self.num_kv_heads,))
                check_dtype(name, scales, torch.float32)
                check_packed(name, scales)

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Rule by which attention scores become weights. Raises `ValueError` for values without sense.

    Attributes:
        scale: factor of the scores, above 0.
        window: sliding window in tokens, with the query's own; None: all up to its own.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: `[num_heads]` logits that take part in the softmax and have no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale is {self.scale}; must be above 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; must be at least 1, or None to see all")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap is {self.softcap}; must be above 0, or None for no cap")
        if self.sinks is not None:
            check_packed("sinks", self.sinks)


def check_inputs(
    query: torch.Tensor, out: torch.Tensor, kv: PagedKv, rule: ScoreRule, tables: torch.Tensor
) -> None:
    """Raises `ValueError` for inputs that the kernels do not support together."""
    num_tokens, num_heads, _ = query.shape
    check_model(num_heads, kv.num_kv_heads, kv.head_dim)
    check_shape("query", query, (num_tokens, num_heads, kv.head_dim))
    check_shape("out", out, query.shape)
    check_dtype("query", query, *FLOATS)
    check_dtype("out", out, query.dtype)
    check_packed("query", query, 2)
    check_packed("out", out, 2)
    check_shape("block tables", tables, tables.shape[:2])
    check_dtype("block tables", tables, torch.int32)
    check_packed("block tables", tables)
    if kv.keys.dtype != torch.float8_e4m3fn:
        check_dtype("the KV cache", kv.keys, query.dtype)
    if rule.sinks is not None:
        check_shape("sinks", rule.sinks, (num_heads,))


@functools.cache
def check_model(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises `ValueError` for heads of a model that no attention kernel supports."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"a head size of {head_dim} has no attention kernel, only {_listed(HEAD_DIMS)} have: "
            "use the torch attention for this model"
        )
    group = num_heads // num_kv_heads
    if group * num_kv_heads != num_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"{num_heads} query heads over {num_kv_heads} KV heads have no attention kernel; there "
            f"may be 1 to {MAX_GROUP} for each: use the torch attention for this model"
        )


def _listed(values: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
