"""Weights by compressed-tensors, the format of llm-compressor and most checkpoints for vLLM.

Which of its arrangements a weight has, its tensors tell: layers may have different ones. The dtype
of the scales is that of the arithmetic, but for experts in FP8, as transformers computes them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch

from baton.engine.executor.models.quantized import fp4, fp8
from baton.engine.executor.models.quantized.bits import bits_of, unpack
from baton.engine.executor.models.quantized.grouped_integers import Integers, packing_of
from baton.engine.executor.models.quantized.packing import MAIN, Packing, Parts
from baton_kernels.cpu.quantized_weight import QuantizedWeight

_MAIN_PACKED: Final = ".weight_packed"
_PLAIN: Final = ".weight"
_SCALE: Final = {"scale": (".weight_scale",)}
_ZEROS: Final = {"zeros": (".weight_zero_point",)}
_GROUPS: Final = {"groups": (".weight_g_idx",)}
_SHAPE: Final = {"shape": (".weight_shape",)}
_OF_ALL: Final = {"global_scale": (".weight_global_scale",)}
_WORDS: Final = frozenset({"I32"})
_INTEGERS: Final = frozenset({"I8"})


def packings(settings: Mapping[str, Any]) -> tuple[Packing, ...]:
    """Returns the packings of compressed-tensors."""
    block = _block(settings)
    exact, in_blocks = partial(fp8.unpack, block=block), partial(_unpack_fp8, block=block)
    return (
        packing_of(_read_words, _MAIN_PACKED, _WORDS, _SCALE | _SHAPE, _ZEROS | _GROUPS),
        Packing(
            _MAIN_PACKED,
            fp4.BYTES,
            _PLAIN,
            _unpack_nvfp4,
            _SCALE | _OF_ALL,
            codes=lambda parts: fp4.codes(parts[MAIN], _scale_of_nvfp4(parts)),
        ),
        Packing(
            _MAIN_PACKED,
            fp4.BYTES,
            _PLAIN,
            _unpack_mxfp4,
            _SCALE,
            codes=lambda parts: fp4.codes(parts[MAIN], fp8.exponents(parts["scale"])),
        ),
        Packing(
            _PLAIN,
            _INTEGERS,
            _PLAIN,
            partial(_unpack_integers, block=block),
            _SCALE,
            _ZEROS,
            codes=partial(_codes_of_integers, block=block),
        ),
        Packing(_PLAIN, fp8.FP8, _PLAIN, exact, _SCALE, within=".experts."),
        Packing(_PLAIN, fp8.FP8, _PLAIN, in_blocks, _SCALE, codes=partial(fp8.codes, block=block)),
    )


def _block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns rows and columns of the blocks that have a scale each, if layers have such."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        named = weights.get("block_structure") if isinstance(weights, Mapping) else None
        if named:
            return int(named[0]), int(named[1])
    return None


def _read_words(parts: Parts) -> Integers:
    """Returns integers of 1 to 8 bits, packed along the inputs and stored with an offset."""
    num_outputs, num_inputs = parts["shape"].tolist()
    scales = _of_outputs(parts["scale"])
    bits = bits_of(parts[MAIN].shape[-1], num_inputs)
    values = unpack(parts[MAIN], bits, num_inputs)
    offset = 2 ** (bits - 1)
    zeros = torch.full_like(scales, offset)
    if (stored := parts.get("zeros")) is not None:
        packed = stored.dtype == torch.int32
        zeros = unpack(stored.t(), bits, num_outputs).t() if packed else stored.short() + offset
    groups = parts.get("groups")
    is_ordered = groups is None or bool((groups < 0).any())  # -1 where it tells nothing
    return Integers(values, scales, zeros, None if is_ordered else groups)


def _unpack_integers(parts: Parts, *, block: tuple[int, int] | None) -> torch.Tensor:
    if "zeros" not in parts:
        return fp8.scaled(parts[MAIN], parts["scale"], block)
    return _integers(parts).dequantized()


def _codes_of_integers(parts: Parts, *, block: tuple[int, int] | None) -> QuantizedWeight | None:
    """Returns integers of 8 bits in codes, unless they have scales for blocks of outputs."""
    return None if block is not None else _integers(parts).quantized()


def _integers(parts: Parts) -> Integers:
    zeros = parts.get("zeros")
    return Integers(
        parts[MAIN], _of_outputs(parts["scale"]), None if zeros is None else _of_outputs(zeros)
    )


def _unpack_fp8(parts: Parts, *, block: tuple[int, int] | None) -> torch.Tensor:
    return fp8.scaled(parts[MAIN], fp8.exponents(parts["scale"]), block)


def _unpack_mxfp4(parts: Parts) -> torch.Tensor:
    return fp4.scaled_fp4(fp4.numbers(parts[MAIN]), fp8.exponents(parts["scale"]))


def _unpack_nvfp4(parts: Parts) -> torch.Tensor:
    """Returns a weight whose scales are divided by that of the whole, rounded to bfloat16."""
    return fp4.scaled_fp4(fp4.numbers(parts[MAIN]), _scale_of_nvfp4(parts)).bfloat16()


def _scale_of_nvfp4(parts: Parts) -> torch.Tensor:
    return parts["scale"].float() / parts["global_scale"].float()


def _of_outputs(each: torch.Tensor) -> torch.Tensor:
    """Returns scales or zero points as `[outputs or 1, groups or 1]`."""
    return each if each.dim() > 1 else each.reshape(-1, 1)
