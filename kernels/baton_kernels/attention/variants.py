"""Variants of the attention kernels for ahead-of-time compilation, by head size, dtype and rule."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch

from baton_kernels.attention.inputs import HEAD_DIMS, MAX_GROUP
from baton_kernels.attention.paged_decode import (
    MERGE_WARPS,
    MERGED_AT_ONCE,
    merge_kernel,
    split_kernel,
)
from baton_kernels.attention.paged_prefill import prefill_kernel
from baton_kernels.attention.tile_descriptors import DTYPES
from baton_kernels.attention.tiles import (
    FP_FUSION as FP_FUSION,  # what `baton_kernels.compile` looks for
)
from baton_kernels.attention.tiling import Tiling, choose_tiling, tile_dim
from baton_kernels.gpu import FP8_TARGETS, GPUS
from baton_kernels.launch import TRITON_TYPES
from baton_kernels.variant import Variant

_BF16: Final = torch.bfloat16
_FP8: Final = torch.float8_e4m3fn
_NUM_KV_HEADS: Final = 8
_USUAL: Final = 90  # whose tilings the names of variants do not mention
_NO_SCALES: Final = {"key_scales": None, "value_scales": None}
_NO_DESCRIPTORS: Final = {"key_descriptor": None, "value_descriptor": None}
_PLAIN: Final = {"WINDOW": None, "SOFTCAP": None, "sinks": None}
_RULED: Final = {"WINDOW": 4096, "SOFTCAP": 50.0}
_FLOATS: Final = (
    "partial_acc",
    "partial_max",
    "partial_sum",
    "key_scales",
    "value_scales",
    "sinks",
)
_SCALARS: Final = {
    "scale": "fp32",
    **dict.fromkeys(
        ("query_stride", "out_stride", "block_stride", "head_stride", "table_width"), "i32"
    ),
}


def _variants() -> Iterator[Variant]:
    for head_dim in HEAD_DIMS:
        for purpose in ("decode", "prefill"):
            yield from _attention(purpose, head_dim)
            yield from _attention(purpose, head_dim, cache=_FP8, rule=_RULED)
            yield from _attention(purpose, head_dim, torch.float32)
            if tile_dim(head_dim) == head_dim:
                yield from _attention(purpose, head_dim, rule=_RULED, deterministic=True)
                yield from _attention(purpose, head_dim, cache=_FP8, deterministic=True)
        yield _merge(head_dim, sinks=None)
    for purpose in ("decode", "shared", "prefill"):
        yield from _attention(purpose, 128, torch.float16)
        yield from _attention(purpose, 128, rule=_RULED)
        yield from _attention(purpose, 128, group=1)
        yield from _attention(purpose, 128, group=MAX_GROUP)
    yield _merge(128)


def _attention(
    purpose: str,
    head_dim: int,
    query: torch.dtype = _BF16,
    cache: torch.dtype | None = None,
    rule: dict[str, Any] = _PLAIN,
    group: int = 4,
    deterministic: bool = False,
) -> Iterator[Variant]:
    """Yields the variants for `purpose`, the name of an `AttentionTiling` field: one for all GPUs
    that have the same tiling, and of a prefill one more for those that load its tiles by TMA."""
    cache = cache or query
    kernel = prefill_kernel if purpose == "prefill" else split_kernel
    types = " over ".join(TRITON_TYPES[dtype] for dtype in dict.fromkeys((query, cache)))
    name = (
        f"{purpose} attention {'deterministic ' * deterministic}{'ruled ' * (rule is _RULED)}"
        f"{types} {head_dim} x {group}"
    )
    tilings = {
        target: choose_tiling(head_dim, query, cache, _NUM_KV_HEADS, GPUS[target], deterministic)
        for target in (FP8_TARGETS if cache == _FP8 else GPUS)
    }
    targets: dict[Tiling, list[int]] = {}
    for target, each in tilings.items():
        targets.setdefault(getattr(each, purpose), []).append(target)
    for tiling, equal in targets.items():
        constants = {
            "NUM_KV_HEADS": _NUM_KV_HEADS,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "TILE_DIM": tile_dim(head_dim),
            "BLOCK_SIZE": 16,
            "ROWS": tiling.rows,
            "TILE_KEYS": tiling.keys,
            "MERGES": deterministic,
            **_NO_DESCRIPTORS,
            **({} if cache == _FP8 else _NO_SCALES),
            **rule,
        }
        variant = Variant(
            name=name if _USUAL in equal else f"{name} sm_{equal[0]}",
            kernel=kernel,
            signature=_signature(kernel, query, cache),
            constants=_taken(kernel, constants),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            targets=tuple(equal),
            needs_mma="bf16" if query == _BF16 else None,
            max_registers=tiling.max_registers,
        )
        yield variant
        with_tma = tuple(target for target in equal if GPUS[target].has_tma)
        if purpose == "prefill" and cache in DTYPES and with_tma:
            yield _by_descriptors(variant, cache, tiling, with_tma)


def _by_descriptors(
    variant: Variant, cache: torch.dtype, tiling: Tiling, targets: tuple[int, ...]
) -> Variant:
    """Returns the variant for blocks that hold whole tiles."""
    constants = {k: v for k, v in variant.constants.items() if k not in _NO_DESCRIPTORS}
    box = [1, 1, tiling.keys, constants["TILE_DIM"]]
    descriptor = f"tensordesc<{TRITON_TYPES[cache]}{box}>"
    return replace(
        variant,
        name=variant.name.replace("attention", "attention by TMA"),
        signature=variant.signature | dict.fromkeys(_NO_DESCRIPTORS, descriptor),
        constants=constants | {"BLOCK_SIZE": 2 * tiling.keys},
        targets=targets,
        needs_tma=True,
    )


def _merge(head_dim: int, **rule: None) -> Variant:
    constants = {
        "NUM_HEADS": _NUM_KV_HEADS * 4,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "TILE_DIM": tile_dim(head_dim),
        "AT_ONCE": MERGED_AT_ONCE,
        **_NO_SCALES,
        **rule,
    }
    return Variant(
        name=f"merge of attention {'' if rule else 'with sinks '}bf16 {head_dim}",
        kernel=merge_kernel,
        signature=_signature(merge_kernel, _BF16, _BF16),
        constants=_taken(merge_kernel, constants),
        num_warps=MERGE_WARPS,
        num_stages=3,
    )


def _taken(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _signature(kernel: Any, query: torch.dtype, cache: torch.dtype) -> dict[str, str]:
    """Returns the types of the kernel's arguments; all remaining ones are int32 plan arrays."""
    types = _SCALARS | dict.fromkeys(_FLOATS, "*fp32")
    types |= dict.fromkeys(("query", "out"), f"*{TRITON_TYPES[query]}")
    types |= dict.fromkeys(("keys", "values"), f"*{TRITON_TYPES[cache]}")
    return {name: types.get(name, "*i32") for name in kernel.arg_names}


VARIANTS: Final = tuple(_variants())
