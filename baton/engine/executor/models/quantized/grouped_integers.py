"""Weights in integers of a few bits, with a scale and a zero point for each group of inputs.

GPTQ packs along the inputs, which it may have put in another order (act-order), and AWQ along the
outputs. The dtype of the scales is that of the arithmetic, as it is in the kernels of both.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from baton.engine.executor.models.quantized.bits import bits_of, unpack
from baton.engine.executor.models.quantized.packing import MAIN, Packing, Parts

_INT32: Final = frozenset({"I32"})
_GROUPED: Final = {"zeros": (".qzeros",), "scales": (".scales",)}
_GROUPS_OF_INPUTS: Final = {"groups": (".g_idx",)}
# Places, in a word of AWQ, of eight outputs that follow each other.
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
_AWQ_BITS: Final = 4


def gptq(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of GPTQ. Its first version stores zero points less 1."""
    named = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    unpack_weight = partial(_unpack_gptq, offset=0 if str(named).lower() == "gptq_v2" else 1)
    return (Packing(".qweight", _INT32, ".weight", unpack_weight, _GROUPED, _GROUPS_OF_INPUTS),)


def awq(_settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of AWQ."""
    return (Packing(".qweight", _INT32, ".weight", _unpack_awq, _GROUPED),)


def auto_round(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packing of AutoRound, which is that of GPTQ or of AWQ."""
    is_awq = str(settings.get("packing_format")).endswith("awq")
    return awq(settings) if is_awq else gptq({})


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns (values - zeros) * scales, `[outputs, inputs]` in the dtype of the scales.

    Args:
        values: integers, `[outputs, inputs]`.
        scales: `[outputs, num_groups]`.
        zeros: zero points, as `scales`; None: they are 0.
        groups: the group of each input; None: groups are of as many inputs each, one after the
            other.
    """
    num_groups, wide = scales.shape[-1], values.to(scales.dtype)
    if groups is None or _are_in_order(groups, num_groups):
        each = wide.unflatten(-1, (num_groups, -1))
        if zeros is not None:
            each.sub_(zeros.to(scales.dtype)[..., None])
        each.mul_(scales[..., None])
        return wide
    chosen = groups.long()
    if zeros is not None:
        wide.sub_(zeros.to(scales.dtype)[:, chosen])
    return wide.mul_(scales[:, chosen])


def _are_in_order(groups: torch.Tensor, num_groups: int) -> bool:
    size = -(-len(groups) // num_groups)
    return torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // size)


def _unpack_gptq(parts: Parts, *, offset: int) -> torch.Tensor:
    scales, zero_words, words = parts["scales"], parts["zeros"], parts[MAIN]
    num_outputs = scales.shape[1]
    bits = bits_of(zero_words.shape[1], num_outputs)
    groups = parts.get("groups")
    num_inputs = words.shape[0] * 32 // bits if groups is None else len(groups)
    values = unpack(words.t(), bits, num_inputs)
    zeros = (unpack(zero_words, bits, num_outputs) + offset).bitwise_and_(2**bits - 1)
    return dequantize(values, scales.t(), zeros.t(), groups)


def _unpack_awq(parts: Parts) -> torch.Tensor:
    scales = parts["scales"]
    num_outputs = scales.shape[1]
    if bits_of(parts[MAIN].shape[1], num_outputs) != _AWQ_BITS:
        raise ValueError(f"AWQ has {_AWQ_BITS} bits")

    def in_order(words: torch.Tensor) -> torch.Tensor:
        packed = unpack(words, _AWQ_BITS, num_outputs).unflatten(-1, (-1, len(_AWQ_PLACES)))
        ordered: torch.Tensor = packed[..., list(_AWQ_PLACES)]
        return ordered.flatten(-2).t()

    return dequantize(in_order(parts[MAIN]), scales.t(), in_order(parts["zeros"]))
