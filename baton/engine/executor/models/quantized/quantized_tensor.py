"""Weights that stay in codes, as tensors that a module of torch may hold."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from baton_kernels.cpu.quantized_weight import QuantizedWeight

_aten = torch.ops.aten


class Codes(NamedTuple):
    """Weight in codes, read when they are needed.

    Attributes:
        shape: numbers of outputs and inputs.
        read: returns the weight, which is in memory as long as its caller keeps it.
    """

    shape: tuple[int, ...]
    read: Callable[[], QuantizedWeight]


def held(weight: QuantizedWeight) -> Codes:
    """Returns a weight that is in memory."""
    return Codes(tuple(weight.shape), lambda: weight)


class QuantizedTensor(torch.Tensor):
    """Weight in codes, with the shape and a dtype of a plain one. An operation computes plain
    numbers for itself alone, of the rows that it takes; products in C take the codes.

    Attributes:
        codes: its codes.
    """

    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype) -> "QuantizedTensor":
        made: QuantizedTensor = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes = codes
        return made

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight, read for the caller."""
        return self.codes.read()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # with defaults, as torch calls it
        cls,
        operation: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (special := _OPERATIONS.get(operation)) is not None:
            return special(*args, **kwargs)
        args, kwargs = tree_map_only(QuantizedTensor, numbers_of, (args, kwargs))
        return operation(*args, **kwargs)


def numbers_of(weight: QuantizedTensor) -> torch.Tensor:
    """Returns the plain weight."""
    return weight.quantized.numbers().to(weight.dtype)


def rows_of(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns a weight with these rows, in codes if it is."""
    if isinstance(weight, QuantizedTensor):
        return QuantizedTensor(held(weight.quantized[rows]), weight.dtype)
    return weight[rows]


def in_memory(weight: torch.Tensor) -> torch.Tensor:
    """Returns a weight whose codes, if it has any, are in memory from now on."""
    if isinstance(weight, QuantizedTensor):
        return QuantizedTensor(held(weight.quantized), weight.dtype)
    return weight


def _same(weight: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(weight.codes, weight.dtype)


def _embedding(weight: QuantizedTensor, indices: torch.Tensor, *_others: Any) -> torch.Tensor:
    rows = weight.quantized[indices.flatten()].numbers().to(weight.dtype)
    return rows.view(*indices.shape, -1)


def _to_copy(weight: QuantizedTensor, **wanted: Any) -> torch.Tensor:
    device = wanted.get("device")
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(weight.shape, dtype=wanted.get("dtype") or weight.dtype, device="meta")
    copy: torch.Tensor = _aten._to_copy.default(numbers_of(weight), **wanted)
    return copy


_OPERATIONS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.embedding.default: _embedding,
    _aten._to_copy.default: _to_copy,
}
