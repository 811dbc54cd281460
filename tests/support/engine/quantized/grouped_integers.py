"""Weights by GPTQ and AWQ, by the descriptions of their packages."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.support.engine.quantized.written import Format, Tensors


def _packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers of a few bits one after the other along the first dimension, in words of 32."""
    each = (values.long()[..., None] >> torch.arange(bits)) & 1  # [count, columns, bits]
    stream = each.transpose(1, 2).flatten(0, 1)  # [count * bits, columns]
    stream = torch.nn.functional.pad(stream, (0, 0, 0, -len(stream) % 32))
    words = (stream.unflatten(0, (-1, 32)) << torch.arange(32)[:, None]).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integers of a weight, `[inputs, outputs]`, with scales and zero points of groups of inputs.

    Attributes:
        groups: the group of each input.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        centred = self.integers.half() - self.zeros.half()[self.groups]
        return (centred * self.scales[self.groups]).t()


def _grouped(
    weight: torch.Tensor, bits: int, *, size: int, symmetric: bool, in_order: bool
) -> Grouped:
    inputs = weight.t()
    groups = torch.arange(len(inputs)) // size
    if not in_order:
        groups = groups[torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))]
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    parts = [inputs[groups == group] for group in range(num_groups)]
    low = torch.stack([part.amin(0) for part in parts])
    high = torch.stack([part.amax(0) for part in parts])
    if symmetric:
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / most).half()
    middle = torch.full_like(low, 2 ** (bits - 1))
    zeros = middle if symmetric else (-low / scales.float()).round().clamp(1, most)
    spread = scales.float()[groups]
    integers = (inputs / spread + zeros[groups]).round().clamp(0, most)
    return Grouped(integers.long(), scales, zeros.long(), groups)


def _gptq(
    weight: torch.Tensor, bits: int, offset: int, options: dict[str, Any]
) -> tuple[Tensors, torch.Tensor]:
    """By GPTQ: packed along the inputs, zero points along the outputs, less an offset."""
    made = _grouped(weight, bits, **options)
    stored = {
        ".qweight": _packed(made.integers, bits),
        ".qzeros": _packed((made.zeros - offset).t(), bits).t(),
        ".scales": made.scales,
        ".g_idx": made.groups.to(torch.int32),
    }
    return stored, made.values


_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """By AWQ: packed along the outputs, of which eight are in another order in a word."""
    made = _grouped(weight, 4, size=16, symmetric=False, in_order=True)

    def packed(integers: torch.Tensor) -> torch.Tensor:
        mixed = integers.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)
        return _packed(mixed.t(), 4).t()

    stored = {".qweight": packed(made.integers), ".qzeros": packed(made.zeros)}
    return {**stored, ".scales": made.scales}, made.values


def _of_gptq(bits: int, size: int, version: str, *, symmetric: bool, in_order: bool) -> Format:
    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": version,
        "sym": symmetric, "desc_act": not in_order,
    }  # fmt: skip
    offset = 0 if version == "gptq_v2" else 1
    options = {"size": size, "symmetric": symmetric, "in_order": in_order}
    return Format(settings, partial(_gptq, bits=bits, offset=offset, options=options))


FORMATS: dict[str, Format] = {
    "gptq": _of_gptq(4, 16, "gptq", symmetric=True, in_order=True),
    "gptq in act-order": _of_gptq(4, 16, "gptq", symmetric=False, in_order=False),
    "gptq of 8 bits": _of_gptq(8, 32, "gptq_v2", symmetric=True, in_order=True),
    "gptq of 3 bits": _of_gptq(3, 32, "gptq_v2", symmetric=False, in_order=False),
    "gptq of 2 bits": _of_gptq(2, 32, "gptq", symmetric=False, in_order=True),
    "auto-round": Format(
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4},
        _of_gptq(4, 32, "gptq", symmetric=True, in_order=True).pack,
    ),
    "awq": Format({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 16}, _awq),
}
