"""Weights in integers of a few bits, with a scale and a zero point for each group of inputs.

GPTQ packs along the inputs, which it may have put in another order (act-order), and AWQ along the
outputs. The dtype of the scales is that of the arithmetic, as it is in the kernels of both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from baton.engine.executor.models.quantized.bits import bits_of, unpack
from baton.engine.executor.models.quantized.packing import MAIN, Packing, Parts
from baton_kernels.cpu.quantized_weight import CODEBOOK_SIZE, INTEGERS, QuantizedWeight, halves_of

_INT32: Final = frozenset({"I32"})
_GROUPED: Final = {"zeros": (".qzeros",), "scales": (".scales",)}
_GROUPS_OF_INPUTS: Final = {"groups": (".g_idx",)}
# Places, in a word of AWQ, of eight outputs that follow each other.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_BITS: Final = 4
_MULTIPLE: Final = 8  # inputs whose codes of 4 bits are packed together
_MIDDLE: Final = 128  # of unsigned codes of 8 bits


def gptq(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of GPTQ. Its first version stores zero points less 1."""
    named = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    read = partial(_read_gptq, offset=0 if str(named).lower() == "gptq_v2" else 1)
    return (_packing(read, _GROUPS_OF_INPUTS),)


def awq(_settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of AWQ."""
    return (_packing(_read_awq, {}),)


def auto_round(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of AutoRound, which is that of GPTQ or of AWQ."""
    is_awq = str(settings.get("packing_format")).endswith("awq")
    return awq(settings) if is_awq else gptq({})


@dataclass(frozen=True, slots=True)
class Integers:
    """Weight (values - zeros) * scales.

    Attributes:
        values: integers, `[outputs, inputs]`, uint8 or int8.
        scales: `[outputs, num_groups]`.
        zeros: zero points, as `scales`; None: they are 0.
        groups: the group of each input; None: groups are of as many inputs each, one after the
            other.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor | None = None

    def dequantized(self) -> torch.Tensor:
        """Returns the weight, `[outputs, inputs]`, in the dtype of the scales, contiguous as
        kernels take it."""
        scales = self.scales
        wide = self.values.to(scales.dtype, memory_format=torch.contiguous_format)
        zeros = None if self.zeros is None else self.zeros.to(scales.dtype)
        if self._are_in_order():
            each = wide.unflatten(-1, (scales.shape[-1], -1))
            if zeros is not None:
                each.sub_(zeros[..., None])
            each.mul_(scales[..., None])
            return wide
        assert self.groups is not None
        chosen = self.groups.long()
        if zeros is not None:
            wide.sub_(zeros[:, chosen])
        return wide.mul_(scales[:, chosen])

    def quantized(self) -> QuantizedWeight | None:
        """Returns the weight in codes, without rounding to the dtype of the scales; None if groups
        are not in order."""
        if not self._are_in_order() or self.values.shape[1] % _MULTIPLE:
            return None
        scales = self.scales.float().expand(len(self.values), -1)
        is_small = self.values.dtype == torch.uint8 and int(self.values.max()) < CODEBOOK_SIZE
        middle = 0
        if self.values.dtype == torch.uint8:
            middle = CODEBOOK_SIZE // 2 if is_small else _MIDDLE
        zeros = torch.zeros(()) if self.zeros is None else self.zeros.float()
        minima = ((middle - zeros) * scales).contiguous()
        codes = halves_of(self.values) if is_small else (self.values - middle).view(torch.int8)
        return QuantizedWeight(
            codes,
            scales.contiguous(),
            minima if minima.any() else None,
            INTEGERS if is_small else None,
        )

    def _are_in_order(self) -> bool:
        if self.groups is None:
            return True
        size = -(-len(self.groups) // self.scales.shape[-1])
        in_order = torch.arange(len(self.groups), device=self.groups.device) // size
        return torch.equal(self.groups.long(), in_order)


def packing_of(
    read: Callable[[Parts], Integers],
    main: str,
    dtypes: frozenset[str],
    parts: Mapping[str, tuple[str, ...]],
    optional: Mapping[str, tuple[str, ...]],
) -> Packing:
    """Returns the packing of weights that `read` reads."""
    return Packing(
        main,
        dtypes,
        ".weight",
        lambda tensors: read(tensors).dequantized(),
        parts,
        optional,
        codes=lambda tensors: read(tensors).quantized(),
    )


def _packing(read: Callable[[Parts], Integers], optional: Mapping[str, tuple[str, ...]]) -> Packing:
    return packing_of(read, ".qweight", _INT32, _GROUPED, optional)


def _read_gptq(parts: Parts, *, offset: int) -> Integers:
    scales, zero_words, words = parts["scales"], parts["zeros"], parts[MAIN]
    num_outputs = scales.shape[1]
    bits = bits_of(zero_words.shape[1], num_outputs)
    groups = parts.get("groups")
    num_inputs = words.shape[0] * 32 // bits if groups is None else len(groups)
    values = unpack(words.t(), bits, num_inputs)
    zeros = (unpack(zero_words, bits, num_outputs) + offset).bitwise_and_(2**bits - 1)
    return Integers(values, scales.t(), zeros.t(), groups)


def _read_awq(parts: Parts) -> Integers:
    scales = parts["scales"]
    num_outputs = scales.shape[1]
    if bits_of(parts[MAIN].shape[1], num_outputs) != _AWQ_BITS:
        raise ValueError(f"AWQ has {_AWQ_BITS} bits")

    def in_order(words: torch.Tensor) -> torch.Tensor:
        packed = unpack(words, _AWQ_BITS, num_outputs).unflatten(-1, (-1, len(_AWQ_PLACES)))
        ordered: torch.Tensor = packed[..., list(_AWQ_PLACES)]
        return ordered.flatten(-2).t()

    return Integers(in_order(parts[MAIN]), scales.t(), in_order(parts["zeros"]))
