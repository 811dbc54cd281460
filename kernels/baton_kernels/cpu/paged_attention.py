"""Paged attention on a CPU by the C library: tensors and plans as the arguments of a call."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from baton_kernels.cpu.arguments import pointer_fields, size_fields
from baton_kernels.cpu.library import KERNELS, load
from baton_kernels.cpu.recording import launch

FUNCTIONS = {torch.float32: "baton_attend_float32", torch.bfloat16: "baton_attend_bfloat16"}


def prompt_arithmetic(dtype: torch.dtype) -> str:
    """Returns the arithmetic of a prompt's attention on this CPU: `float32`, `bfloat16 pairs`
    (AVX-512 BF16) or `AMX tiles`. Raises `NoLibraryError`."""
    if dtype != torch.bfloat16:
        return "float32"
    function = load(KERNELS).baton_bfloat16_arithmetic
    function.restype = ctypes.c_char_p
    return str(function(), "ascii")


class _Work(ctypes.Structure):
    """Part of a call that layers of a step have in common, as `Work` in paged_attention.c."""

    _fields_ = (
        *pointer_fields("table", "items"),
        *size_fields("table_width", "num_items"),
    )


class _Call(ctypes.Structure):
    """Arguments of one call, as `Call` in paged_attention.c."""

    _fields_ = (
        *pointer_fields("query", "out", "new_keys", "new_values", "keys", "values", "work"),
        ("query_strides", ctypes.c_int64 * 2),
        ("out_strides", ctypes.c_int64 * 2),
        ("new_key_strides", ctypes.c_int64 * 2),
        ("new_value_strides", ctypes.c_int64 * 2),
        ("key_strides", ctypes.c_int64 * 3),
        ("value_strides", ctypes.c_int64 * 3),
        *size_fields(
            "num_kv_heads",
            "rows_per_query",
            "key_dim",
            "value_dim",
            "block_size",
            "window",
            "num_threads",
        ),
        ("scale", ctypes.c_float),
    )


class Work:
    """Work of the layers of one step.

    Args:
        table: `[num_sequences, blocks]`, blocks of each sequence.
        items: `[num_items, 4]`, ranges of queries that together are all tokens: the sequence, the
            first token in the flat batch, its position, and the number of tokens.
    """

    def __init__(self, table: npt.NDArray[np.int32], items: npt.NDArray[np.int64]) -> None:
        self._arguments = _Work()
        self.address = ctypes.addressof(self._arguments)
        self.assign(table, items)

    def assign(self, table: npt.NDArray[np.int32], items: npt.NDArray[np.int64]) -> None:
        """Has calls that were recorded with this work do another."""
        self.table, self.items = table, items
        arguments = self._arguments
        arguments.table, arguments.table_width = table.ctypes.data, table.shape[1]
        arguments.items, arguments.num_items = items.ctypes.data, len(items)


class PagedLayer:
    """Paged attention of one layer, over its cache.

    Args:
        keys: `[num_blocks, num_kv_heads, block_size, key_dim]`, of any strides but in its last
            dimension; `values` the same of V.
        window: tokens that a query sees, its own included; None: all.

    Raises `NoLibraryError` if the library is not available.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> None:
        assert keys.stride(3) == values.stride(3) == 1
        self._function = getattr(load(KERNELS), FUNCTIONS[keys.dtype])
        self._function.restype = None
        self._cache = keys, values  # the call has their addresses
        self.num_kv_heads = keys.shape[1]
        self._value_dim = values.shape[3]
        self._fixed = bytes(
            _Call(
                keys=keys.data_ptr(),
                values=values.data_ptr(),
                key_strides=keys.stride()[:3],
                value_strides=values.stride()[:3],
                num_kv_heads=keys.shape[1],
                key_dim=keys.shape[3],
                value_dim=values.shape[3],
                block_size=keys.shape[2],
                window=window or 0,
            )
        )

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        work: Work,
        scale: float,
    ) -> torch.Tensor:
        """Writes K and V of all tokens to the cache, then attends.

        Args:
            query: `[num_tokens, num_heads, key_dim]`.
            key: `[num_tokens, num_kv_heads, key_dim]`.
            value: `[num_tokens, num_kv_heads, value_dim]`.

        Returns `[num_tokens, num_heads, value_dim]`.
        """
        query, key, value = map(_with_whole_heads, (query, key, value))
        out = query.new_empty(query.shape[0], query.shape[1], self._value_dim)
        call = _Call.from_buffer_copy(self._fixed)
        call.query, call.query_strides = query.data_ptr(), query.stride()[:2]
        call.out, call.out_strides = out.data_ptr(), out.stride()[:2]
        call.new_keys, call.new_key_strides = key.data_ptr(), key.stride()[:2]
        call.new_values, call.new_value_strides = value.data_ptr(), value.stride()[:2]
        call.work = work.address
        call.rows_per_query = query.shape[1] // self.num_kv_heads
        call.num_threads = torch.get_num_threads()
        call.scale = scale
        launch(self._function, call, query, key, value, out, work)
        return out


def _with_whole_heads(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
