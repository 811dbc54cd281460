"""Detection of Llama-shaped decoders, dense or with experts, which the engine replaces by its own
(`fused_model`, `triton_model`).
"""

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from baton.engine.executor.models.hf import PreTrainedModel

DENSE: Final = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen 2",
    "Qwen3ForCausalLM": "Qwen 3",
}
"""Classes without experts, and their names for users."""

_WITH_EXPERTS: Final = {
    "MixtralForCausalLM": "Mixtral",
    "Qwen3MoeForCausalLM": "Qwen 3 MoE",
    "GptOssForCausalLM": "gpt-oss",
}
# Classes with plain weights; quantized ones are other classes.
_EXPERTS: Final = {"MixtralExperts", "Qwen3MoeExperts", "GptOssExperts"}


def is_dense(model: PreTrainedModel) -> bool:
    """Returns whether this is a known decoder without experts, unsharded, with plain weights."""
    return type(model).__name__ in DENSE and why_unknown(model) is None


def why_unknown(model: PreTrainedModel) -> str | None:
    """Returns the reason for which `triton_model` cannot run this model; None if it can."""
    name = type(model).__name__
    known = DENSE | _WITH_EXPERTS
    if name not in known:
        *others, last = known.values()
        return (
            f"of {name} there is no form whose products do not depend on the batch, only of "
            f"{', '.join(others)} and {last}"
        )
    if name != "GptOssForCausalLM" and model.config.hidden_act != "silu":
        return (
            f"this {name} has the activation {model.config.hidden_act!r}, and of its gates there "
            "is a form on kernels for 'silu' alone"
        )
    for index, layer in enumerate(model.model.layers):
        for part in _products(layer):
            if type(part) is not nn.Linear and type(part).__name__ not in _EXPERTS:
                return (
                    f"layer {index} of this {name} has a {type(part).__name__}, and of its "
                    "products there is a form on kernels for plain weights alone"
                )
    return None


def _products(layer: Any) -> Iterator[nn.Module]:
    """Yields the modules of a layer that multiply matrices, except routers."""
    attn, mlp = layer.self_attn, layer.mlp
    yield from (attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj)
    if hasattr(mlp, "experts"):
        yield mlp.experts
    else:
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
