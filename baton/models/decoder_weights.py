"""Weights of the most common decoders by their configuration: names and shapes.

Knows nothing of files, and nothing of torch. Other models are known once transformers builds them.
"""

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]

_DECODERS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
# Where a configuration may leave it out, since it is that of all heads together.
_SHARED_HEAD_DIM = frozenset({"llama", "mistral", "qwen2"})


def decoder_weights(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Returns the shapes of a decoder's matrices and norms by name, without the prefix "model." and
    without the head, which may be that of the embeddings; empty for a model that is not among the
    most common ones, or whose configuration leaves sizes to its class."""
    sizes = [size for name in _SIZES if (size := _size(config.get(name)))]
    if _DECODERS.isdisjoint(config.get("architectures") or ()) or len(sizes) < len(_SIZES):
        return {}
    vocab_size, hidden_size, inner_size, num_layers, num_heads, num_kv_heads = sizes
    head_dim = _size(config.get("head_dim"))
    if not head_dim and config.get("model_type") in _SHARED_HEAD_DIM:
        head_dim = hidden_size // num_heads
    if not head_dim:
        return {}
    q_size, kv_size, norm = num_heads * head_dim, num_kv_heads * head_dim, (hidden_size,)
    of_layer = {
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn.q_proj": (q_size, hidden_size),
        "self_attn.k_proj": (kv_size, hidden_size),
        "self_attn.v_proj": (kv_size, hidden_size),
        "self_attn.o_proj": (hidden_size, q_size),
        "mlp.gate_proj": (inner_size, hidden_size),
        "mlp.up_proj": (inner_size, hidden_size),
        "mlp.down_proj": (hidden_size, inner_size),
    }
    layers = {
        f"layers.{i}.{name}.weight": shape
        for i in range(num_layers)
        for name, shape in of_layer.items()
    }
    return {"embed_tokens.weight": (vocab_size, hidden_size), **layers, "norm.weight": norm}


def _size(value: Any) -> int:
    """Returns 0 for what is no size."""
    return value if isinstance(value, int) else 0
