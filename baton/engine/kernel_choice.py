"""Which kernels a model runs on: Triton's, or those of torch."""

import logging

import torch

from baton.engine.config import EngineConfig
from baton.engine.transformers_model import ProbedLayer
from baton.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


def uses_triton(config: EngineConfig, device: torch.device, layers: list[ProbedLayer]) -> bool:
    """Raises `InvalidArgumentError`, with a sentence on what to change, if Triton is asked for and
    cannot be had."""
    is_wanted = config.kernels == "triton" or config.deterministic
    if config.kernels == "torch" or not (is_wanted or device.type == "cuda"):
        return False
    why_not = _missing_device(device) or _missing_kernel(layers)
    if why_not is None:
        return True
    if is_wanted:
        field = "deterministic" if config.deterministic else "kernels"
        value = True if config.deterministic else config.kernels
        raise InvalidArgumentError(field, f"is {value!r}, which needs Triton's kernels; {why_not}")
    logger.warning("torch computes attention, which is slower: %s", why_not)
    return False


def _missing_device(device: torch.device) -> str | None:
    import triton

    if device.type == "cuda" or triton.knobs.runtime.interpret:
        return None
    return "they run on a GPU and the device is a CPU: use kernels=torch there"


def _missing_kernel(layers: list[ProbedLayer]) -> str | None:
    from kernels.attention_inputs import check_model

    for layer in layers:
        shape = layer.shape
        if shape.key_head_dim != shape.value_head_dim:
            return f"K has heads of {shape.key_head_dim} and V of {shape.value_head_dim}"
        try:
            check_model(layer.num_heads, shape.num_kv_heads, shape.key_head_dim)
        except ValueError as error:
            return str(error)
    return None
