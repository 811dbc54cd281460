"""Quantization of a checkpoint's weights, as its files describe it.

Knows which methods Baton reads, by name; `baton/engine/executor/models/quantized/` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.errors import UnsupportedModelError
from baton.models import read_json

_CONFIG: Final = "config.json"
# Keys under which a configuration describes quantized weights.
_KEYS: Final = ("quantization_config", "compression_config")
# Where modelopt describes them, beside a configuration that does not.
_MODELOPT_FILE: Final = "hf_quant_config.json"

_BITSANDBYTES: Final = "bitsandbytes"
METHODS: Final = (
    "fp8", "fbgemm_fp8", "mxfp8", "compressed-tensors", "gptq", "awq", "auto-round", "mxfp4",
    _BITSANDBYTES, "modelopt",
)  # fmt: skip
# Of those methods, what Baton does not read: the keys that name a variant, and those it reads.
_VARIANTS: Final[Mapping[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "gptq": (("checkpoint_format", "format"), frozenset({"gptq", "gptq_v2"})),
    "awq": (("version", "checkpoint_format", "format"), frozenset({"gemm", "exllama", "ipex"})),
    "auto-round": (
        ("packing_format",), frozenset({"auto_round:auto_gptq", "auto_round:auto_awq"}),
    ),
    "compressed-tensors": (
        ("format",),
        frozenset({
            "dense", "naive-quantized", "int-quantized", "float-quantized", "pack-quantized",
            "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
        }),
    ),
    "modelopt": (
        ("quant_algo",),
        frozenset({
            "fp8", "fp8_pc_pt", "fp8_per_channel_per_token", "nvfp4", "w4a16_nvfp4",
            "mixed_precision",
        }),
    ),
}  # fmt: skip
# Settings by which the weights are not those of the model, even when they are plain numbers.
_TRANSFORMS: Final = ("transform_config", "sparsity_config")
NEAREST: Final = {
    "aqlm": "gptq", "vptq": "gptq", "spqr": "gptq", "higgs": "gptq", "hqq": "gptq or awq",
    "sinq": "gptq or awq", "quanto": "compressed-tensors", "torchao": "compressed-tensors",
    "quark": "fp8 or compressed-tensors", "fp_quant": "compressed-tensors", "nvfp4": "modelopt",
    "fouroversix": "modelopt", "eetq": "bitsandbytes", "bitnet": "gptq", "metal": "gptq",
    "gemma": "gptq or awq",
}  # fmt: skip
"""By a method that is not read, the nearest that is."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Method by which a checkpoint's weights are quantized, and its settings.

    Attributes:
        method: name of the method, as transformers has it.
        settings: what the files say of it.
    """

    method: str
    settings: Mapping[str, Any]

    @property
    def variant(self) -> str | None:
        """The arrangement of a method that has several; None if the files name none."""
        keys, _ = _VARIANTS.get(self.method, ((), None))
        named = next((self.settings[key] for key in keys if self.settings.get(key)), None)
        return None if named is None else str(named).lower()


def read_quantization(folder: Path) -> Quantization | None:
    """Returns how the weights of a checkpoint in a folder are quantized; None if they are not."""
    described = quantization_of(read_json(folder / _CONFIG))
    if described is None and (folder / _MODELOPT_FILE).is_file():
        settings = read_json(folder / _MODELOPT_FILE).get("quantization")
        if isinstance(settings, Mapping) and settings.get("quant_algo"):
            return Quantization("modelopt", settings)
    return described


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Returns how a configuration, or that of its language model, says weights are quantized."""
    for described in (config, config.get("text_config")):
        for key in _KEYS:
            settings = described.get(key) if isinstance(described, Mapping) else None
            if settings:
                return _read(settings if isinstance(settings, Mapping) else {}, key)
    return None


def check_quantization(quantization: Quantization | None, architecture: str) -> None:
    """Raises `UnsupportedModelError` for a method, or a variant of one, that Baton does not
    read."""
    if quantization is not None and (unread := _unread(quantization)):
        named, nearest = unread
        raise UnsupportedModelError(
            f"the weights of {architecture} are quantized by {named}, which Baton does not read; "
            f"it reads {', '.join(METHODS)}: give a checkpoint of it by {nearest}, or the original "
            "one"
        )


def without_quantization(config: Any) -> None:
    """Takes out of a configuration of transformers, and of its language model's, what they say of
    quantized weights."""
    for described in (config, getattr(config, "text_config", None)):
        for key in _KEYS:
            if getattr(described, key, None) is not None:
                delattr(described, key)


def _unread(quantization: Quantization) -> tuple[str, str] | None:
    """Returns names of what Baton does not read, and of the nearest that it does; None if it reads
    the weights."""
    method, variant = quantization.method, quantization.variant
    if method not in METHODS:
        return method, NEAREST.get(method, "fp8, gptq or awq")
    _, known = _VARIANTS.get(method, ((), None))
    if known is not None and variant is not None and variant not in known:
        return (
            f"{method} in the arrangement {variant!r}",
            f"{method} as {' or '.join(sorted(known))}",
        )
    for key in _TRANSFORMS:
        if _is_used(quantization.settings.get(key)):
            return f"{method} with a {key}", f"{method} without it"
    return None


def _is_used(setting: Any) -> bool:
    if not isinstance(setting, Mapping):
        return False
    return bool(setting.get("config_groups")) or setting.get("format", "dense") != "dense"


def _read(settings: Mapping[str, Any], key: str) -> Quantization:
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return Quantization(_BITSANDBYTES, settings)
    default = "compressed-tensors" if key == "compression_config" else "an unnamed method"
    return Quantization(str(settings.get("quant_method") or default), settings)
