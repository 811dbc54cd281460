"""Settings that kernels follow from, by what the device and the model have."""

import torch

from baton.engine.config import EngineConfig
from baton_kernels.cpu.library import KERNELS, NoLibraryError, load
from baton_kernels.cpu.rowwise import DTYPES


def triton_setting(config: EngineConfig) -> str | None:
    """Returns the setting that requires Triton kernels; None: none does."""
    if config.deterministic:
        return "deterministic"
    if config.attention_backend != "auto":
        return "attention_backend"
    return "kernels" if config.kernels == "triton" else None


def why_no_products_in_c(
    config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Returns the reason for which a dense model's products are not kernels in C; None if they
    are."""
    if device.type not in ("cpu", "meta"):
        return f"they run on a CPU and the device is {device.type}: unset it there"
    named = triton_setting(config) or ("kernels" if config.kernels != "auto" else None)
    if named is not None:
        return f"and {named} is {getattr(config, named)!r}: unset one of them"
    if dtype not in DTYPES:
        return f"they compute in float32 and bfloat16, and dtype is {dtype}: choose one"
    try:
        load(KERNELS)
    except NoLibraryError as error:
        return f"and there are none: {error}"
    return None
