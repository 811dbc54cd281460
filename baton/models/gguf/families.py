"""Model families that are read from GGUF, by llama.cpp's names of architectures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton.errors import UnsupportedModelError

# Keys of every family, without the architecture before them, and their names in transformers.
_COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_HEAD = {"attention.key_length": "head_dim"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SLIDING = {"attention.sliding_window": "sliding_window"}
_SOFTCAPPING = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA = {**_RMS, **_HEAD, **_SLIDING, **_SOFTCAPPING}


@dataclass(frozen=True, slots=True)
class Family:
    """Family as transformers has it.

    Attributes:
        model_type, architecture: names in its configuration.
        names: of settings in its configuration, by their keys in GGUF.
        constants: settings that a file does not have.
        rotated: how much of a head has rotary positions.
        num_layers_of_largest: of the model whose attention is scaled otherwise, which llama.cpp's
            code has and no file.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    rotated: Literal["all", "all or part", "none"] = "all"
    num_layers_of_largest: int | None = None


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", _COMMON | _RMS | _HEAD),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", _COMMON | _RMS),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _COMMON | _RMS | _HEAD),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _COMMON
        | _RMS
        | _EXPERTS
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _COMMON | _RMS | _HEAD | _EXPERTS,
        # llama.cpp's code has it.
        constants={"norm_topk_prob": True},
    ),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", _COMMON | _GEMMA, num_layers_of_largest=46),
    "gemma3": Family(
        "gemma3_text", "Gemma3ForCausalLM", _COMMON | _GEMMA, num_layers_of_largest=62
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", _COMMON | _RMS | _SLIDING, rotated="all or part"),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"},
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        rotated="none",
    ),
}


def family_of(architecture: str) -> Family:
    """Returns the family of `general.architecture`. Raises `UnsupportedModelError` for others."""
    if architecture not in FAMILIES:
        raise UnsupportedModelError(
            f"GGUF files of architecture {architecture!r} are not read; expected "
            f"{', '.join(FAMILIES)}: give the original checkpoint, a folder or a hub id"
        )
    return FAMILIES[architecture]
