"""Fused residual and RMSNorm for decoder layers of transformers, on Triton kernels.

Only layers of the plain form: norm, attention, residual, norm, MLP, residual. They are detected by
their modules' names and a probe: in a forward of the whole model, with attention in which a token
sees only its own value, the fused layer's output has to match the layer's.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from baton.engine.executor.models.transformers_model import TransformersModel
from baton.engine.executor.models.triton.kernel_modules import KernelNorm, is_close

_PARTS: Final = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_NUM_TOKENS: Final = 4


def fuse_residuals(model: nn.Module, decoder: TransformersModel, device: torch.device) -> int:
    """Fuses the residual and the second norm of a model's plain layers. Returns how many it fused.

    Args:
        decoder: runs `model`, whose norms are swapped already; its cache is set afterwards.
    """
    fused: dict[nn.Module, _Layer] = {}

    def compare(layer: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        candidate = _Layer(layer)
        try:
            found = candidate(*args, **kwargs)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return  # the layer calls its modules differently
        if is_close(found, out):
            fused[layer] = candidate

    layers = [module for module in model.modules() if _is_plain(module)]
    if not layers:
        return 0
    listening = [layer.register_forward_hook(compare, with_kwargs=True) for layer in layers]
    try:
        attention: Any = _OwnValues()
        batch: Any = object()  # that attention ignores it
        decoder.use(attention)
        tokens = torch.arange(_NUM_TOKENS, device=device)
        with torch.inference_mode():
            decoder.forward(tokens, tokens, batch, tokens)
    finally:
        for hook in listening:
            hook.remove()
    for layer, form in fused.items():
        layer.forward = form
    return len(fused)


def _is_plain(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    if not all(name in parts for name in _PARTS):
        return False
    return isinstance(parts["post_attention_layernorm"].forward, KernelNorm)


class _Layer:
    """Fused forward of a plain layer: `[1, num_tokens, hidden_size]`."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._otherwise: Callable[..., Any] = layer.forward
        self._norm: KernelNorm = layer.post_attention_layernorm.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1:
            return self._otherwise(*args, **kwargs)
        (stream,) = args
        layer, norm = self._layer, self._norm
        attended, *_ = layer.self_attn(hidden_states=layer.input_layernorm(stream), **kwargs)
        if norm.takes(stream) and norm.takes(attended):
            # Adds in place to attention's output, which has no other user; `stream` is unchanged.
            return attended + layer.mlp(norm.of_sum(stream, attended))
        attended = stream + attended
        return attended + layer.mlp(norm(attended))


class _OwnValues:
    """Attention of the probe, in which each token sees only itself."""

    def forward(self, *args: Any) -> torch.Tensor:
        _index, _layer, query, _key, value, _batch = args
        heads: torch.Tensor = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return heads
