"""Stand-ins of FlashInfer and FlashAttention 3 that run on a CPU.

They have the signatures that we call, check what the libraries' sources check or rely on, and
compute attention in float64. Checked against flashinfer-python 0.7.2 (`prefill.py`, `decode.py`,
`batch_prefill_sm90.cu`) and flash_attn_3 3.0.0b2 (`flash_attn_interface.py`, `flash_api.cpp`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rule:
    scale: float
    window_left: int
    softcap: float


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int, rule: Rule
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence: `[num_queries, num_heads, dim]`; K and V
    are `[num_kv_heads, length, dim]`."""
    group = query.shape[1] // keys.shape[0]
    key, value = (x.double().repeat_interleave(group, 0) for x in (keys, values))
    scores = query.transpose(0, 1).double() @ key.transpose(1, 2) * rule.scale
    if rule.softcap > 0:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    position = torch.arange(length - len(query), length)[:, None]
    seen = torch.arange(length) <= position
    if rule.window_left >= 0:
        seen &= torch.arange(length) >= position - rule.window_left
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).to(query.dtype)


def attend_all(
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    offsets: Sequence[int],
    blocks: Sequence[torch.Tensor],
    lengths: Sequence[int],
    rule: Rule,
) -> torch.Tensor:
    """Attends each sequence; `pages` are `[num_pages, num_kv_heads, page_size, dim]`."""
    out = torch.empty_like(query)
    for i, (own, length) in enumerate(zip(blocks, lengths, strict=True)):
        keys, values = (x[own.long()].transpose(0, 1).flatten(1, 2)[:, :length] for x in pages)
        rows = slice(offsets[i], offsets[i + 1])
        out[rows] = attend(query[rows], keys, values, length, rule)
    return out


def check_loads(*tensors: torch.Tensor) -> None:
    """Kernels load 16 bytes at once, of contiguous heads, at any strides."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def check_int32(x: torch.Tensor, *shape: int) -> None:
    assert x.dtype == torch.int32
    assert x.is_contiguous()
    assert x.shape == shape


def flash_attn_interface(dtypes: Sequence[torch.dtype] = HALVES) -> SimpleNamespace:
    """The module of FlashAttention 3."""

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        (total_q, num_heads, head_dim), (batch, num_pages) = q.shape, page_table.shape
        _, page_size, num_kv_heads, _ = k_cache.shape
        assert q.dtype in dtypes
        assert k_cache.dtype == v_cache.dtype == q.dtype
        assert k_cache.shape[3] == head_dim <= 256
        assert head_dim % 8 == num_heads % num_kv_heads == 0
        assert v_cache.shape == k_cache.shape
        check_loads(q, k_cache, v_cache)
        check_int32(page_table, batch, num_pages)
        check_int32(cu_seqlens_q, batch + 1)
        check_int32(cache_seqlens, batch)
        offsets, lengths = cu_seqlens_q.tolist(), cache_seqlens.tolist()
        assert offsets[0] == 0
        assert offsets[-1] == total_q
        assert max(cu_seqlens_q.diff().tolist()) == max_seqlen_q
        assert 0 < max(lengths) <= num_pages * page_size
        assert causal
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        pages = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        rule = Rule(softmax_scale, window_size[0], softcap)
        return attend_all(q, pages, offsets, page_table, lengths, rule)

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)


class _Wrapper:
    """Either wrapper of FlashInfer: a plan, and the layers that run under it."""

    dtypes: Sequence[torch.dtype]

    def _set_up(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert workspace.data_ptr() % 16 == 0
        assert workspace.nbytes >= 128 * 2**20

    def _plan(
        self,
        queries: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        shape: tuple[int, int, int, int],
        rule: Rule,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        begins, blocks, last = pages
        batch, (num_heads, num_kv_heads, head_dim, page_size) = len(last), shape
        check_int32(queries, batch + 1)
        check_int32(begins, batch + 1)
        check_int32(blocks, int(begins[-1]))
        check_int32(last, batch)
        assert all(x.device.type == "cpu" for x in (queries, begins, last))  # else it waits
        assert begins[0] == queries[0] == 0
        assert 1 <= int(last.min()) <= int(last.max()) <= page_size
        assert num_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        assert dtypes[0] == dtypes[1]
        assert dtypes[0] in self.dtypes
        self._shape, self._rule, self._dtype = shape, rule, dtypes[0]
        self._offsets = queries.tolist()
        self._blocks = blocks.split(begins.diff().tolist())
        full = (begins.diff() - 1) * page_size
        self._lengths = (full + last).tolist()

    def run(self, q: torch.Tensor, paged_kv_cache: Any) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert isinstance(paged_kv_cache, tuple)
        keys, values = paged_kv_cache
        assert q.shape == (self._offsets[-1], num_heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert keys.stride() == values.stride()  # as its kernels for Hopper require
        assert q.dtype == keys.dtype == values.dtype == self._dtype
        check_loads(q, keys, values)
        pages = (keys, values)
        return attend_all(q, pages, self._offsets, self._blocks, self._lengths, self._rule)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._set_up(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        rule = Rule(sm_scale, window_left, logits_soft_cap or 0.0)
        self._plan(qo_indptr, pages, shape, rule, (q_data_type, kv_data_type))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_tensor_cores: bool = False,
    ) -> None:
        assert use_tensor_cores  # others have no kernel for each number of query heads
        self._set_up(float_workspace_buffer, kv_layout)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        queries = torch.arange(len(indptr), dtype=torch.int32)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        rule = Rule(sm_scale, window_left, logits_soft_cap or 0.0)
        pages = (indptr, indices, last_page_len)
        self._plan(queries, pages, shape, rule, (q_data_type, kv_data_type))


def flashinfer(dtypes: Sequence[torch.dtype] = HALVES) -> SimpleNamespace:
    """The module of FlashInfer."""
    wrappers = (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper)
    made = {each.__name__: type(each.__name__, (each,), {"dtypes": dtypes}) for each in wrappers}
    return SimpleNamespace(**made)


STAND_INS = {"flashinfer": flashinfer, "flash-attn": flash_attn_interface}
