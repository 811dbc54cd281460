"""Scales of an fp8 (e4m3) KV cache: the ratio of a value to the stored number.

Static, one for K and one for V of a layer, or of each of its KV heads, with vLLM's meaning: the
cache holds x / scale, clipped to the type's range and rounded to the nearest, and attention sees
scale * stored. They are read from the checkpoint's tensors `...<layer>....k_scale` and
`...<layer>....v_scale`, as tools that quantise for vLLM write them; missing ones are 1. Nothing is
measured while serving: a block means the same on every worker with the checkpoint, at any time.
Knows nothing of pools or attention.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open

from baton.errors import UnsupportedModelError

FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(FP8).max
# The first number in a name is the layer's: model.layers.3.self_attn.k_proj.k_scale.
_NAME: Final = re.compile(r"\D*?\.(\d+)\.(?:.*\.)?([kv])_scale")


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of one layer's K and V: float32 `[num_kv_heads]`, each above 0, on the cache's
    device."""

    key: torch.Tensor
    value: torch.Tensor

    def store(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V, `[num_tokens, num_kv_heads, head_dim]` each, quantised for the cache."""
        return _quantised(key, self.key), _quantised(value, self.value)


def _quantised(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # e4m3 has no infinity: some releases of torch convert too large numbers to NaN.
    return (x.float() / scales[:, None]).clamp_(-_LARGEST, _LARGEST).to(FP8)


def is_scale(name: str) -> bool:
    """Returns True for the name of a checkpoint's tensor that has scales of K or V."""
    return _NAME.fullmatch(name) is not None


def read_scales(folder: str, num_kv_heads: Sequence[int], device: torch.device) -> list[KvScales]:
    """Reads the scales of each layer from the checkpoint in `folder`.

    Args:
        num_kv_heads: KV heads of each layer.

    Raises `UnsupportedModelError` for a scale that is not above 0, or for a tensor of neither one
    number nor one per KV head.
    """
    found = dict(_stored_scales(folder, num_kv_heads))

    def of(layer: int, kind: str) -> torch.Tensor:
        scales = found.get((layer, kind), torch.ones(1))
        return scales.expand(num_kv_heads[layer]).contiguous().to(device)

    return [KvScales(of(i, "k"), of(i, "v")) for i in range(len(num_kv_heads))]


def _stored_scales(
    folder: str, num_kv_heads: Sequence[int]
) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """Yields by layer, and "k" or "v": float32 of one number or one for each KV head."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                match = _NAME.fullmatch(name)
                if match and int(match[1]) < len(num_kv_heads):
                    layer = int(match[1])
                    scales = file.get_tensor(name).float().flatten()
                    _check(name, scales, num_kv_heads[layer])
                    yield (layer, match[2]), scales


def _check(name: str, scales: torch.Tensor, num_kv_heads: int) -> None:
    if len(scales) not in (1, num_kv_heads):
        raise UnsupportedModelError(
            f"the checkpoint's {name} has {len(scales)} numbers; an fp8 KV cache takes one scale, "
            f"or one for each of the layer's {num_kv_heads} KV heads: use --kv-cache-dtype auto"
        )
    if not (scales.isfinite() & (scales > 0)).all():
        raise UnsupportedModelError(
            f"the checkpoint's {name} is {scales.tolist()}; a scale of an fp8 KV cache has to be "
            "above 0: use --kv-cache-dtype auto"
        )


def describe(scales: Sequence[KvScales]) -> str:
    """Returns a string that is equal for equal scales, and empty if all are 1."""
    parts = [part.cpu() for layer in scales for part in (layer.key, layer.value)]
    numbers = torch.cat(parts) if parts else torch.ones(0)
    if (numbers == 1).all():
        return ""
    return f"scales {hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:32]}"
