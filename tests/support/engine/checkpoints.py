"""Random checkpoints of many families, a few hundred kilobytes each.

Weights are drawn wide enough that attention looks at particular tokens and logits are well apart;
norms, biases and sinks are not left at their neutral values, so that one which is forgotten shows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
MAX_LEN = 256
BLOCK_SIZE = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def small_config(class_name: str, **changes: Any) -> PretrainedConfig:
    """Returns the configuration of a small model of a class of transformers."""
    config: PretrainedConfig = getattr(transformers, class_name)(**{**_COMMON, **changes})
    return config


def _family(class_name: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: small_config(class_name, **changes)


_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
_SHARING = ["sliding_attention", "full_attention", "full_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _family("LlamaConfig"),
    "llama_biased": _family(
        "LlamaConfig", attention_bias=True, mlp_bias=True, head_dim=8, tie_word_embeddings=True
    ),
    "llama_yarn": _family(
        "LlamaConfig", rope_parameters={**_YARN, "original_max_position_embeddings": 64}
    ),
    "llama_extended": _family(
        "LlamaConfig",
        max_position_embeddings=64,
        rope_parameters={**_YARN, "original_max_position_embeddings": 64},
    ),
    "llama_llama3_rope": _family("LlamaConfig", rope_parameters=_LLAMA3),
    "llama_eos": _family("LlamaConfig", eos_token_id=[384, 330]),
    "llama_few_words": _family("LlamaConfig", vocab_size=12),
    "llama_gelu": _family("LlamaConfig", hidden_act="gelu"),
    "qwen2": _family("Qwen2Config"),
    "qwen2_hybrid": _family(
        "Qwen2Config", use_sliding_window=True, sliding_window=21, layer_types=_HYBRID
    ),
    "qwen3": _family("Qwen3Config", head_dim=32),
    "mistral_short": _family("MistralConfig", sliding_window=11, num_key_value_heads=1),
    "mistral_long": _family("MistralConfig", sliding_window=200),
    "gpt2": _family("GPT2Config"),
    "gpt2_scaled": _family("GPT2Config", scale_attn_by_inverse_layer_idx=True),
    "gemma2": _family(
        "Gemma2Config", head_dim=16, sliding_window=24, query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0, layer_types=_HYBRID,
    ),
    "gemma3": _family(
        "Gemma3TextConfig", head_dim=16, sliding_window=9, query_pre_attn_scalar=16,
        layer_types=_HYBRID,
    ),
    "gpt_oss": _family(
        "GptOssConfig", head_dim=16, sliding_window=20, num_local_experts=4,
        num_experts_per_tok=2, layer_types=_HYBRID,
        rope_parameters={**_YARN, "original_max_position_embeddings": 64},
    ),
    "mixtral": _family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _family(
        "Qwen3MoeConfig", head_dim=16, moe_intermediate_size=48, num_experts=6,
        num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=2,
    ),
    "cohere2": _family("Cohere2Config", sliding_window=9, layer_types=_HYBRID),
    "gpt_neox": _family("GPTNeoXConfig"),
    "gemma3n": _family(
        "Gemma3nTextConfig", head_dim=16, sliding_window=9, layer_types=_SHARING,
        num_hidden_layers=3, num_kv_shared_layers=1, vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=16, activation_sparsity_pattern=[0.0, 0.0, 0.0],
    ),
    "deepseek_v3": _family(
        "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
}  # fmt: skip


def save_random(config: PretrainedConfig, folder: Path, seed: int = 0) -> None:
    """Writes a model with random weights to a folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    model.save_pretrained(folder)


def randomize(model: PreTrainedModel) -> None:
    """Sets random weights by which tokens matter to each other."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                std = 1.0 if "embed" in name else 1.3 * HIDDEN_SIZE**-0.5
                torch.nn.init.normal_(weight, std=std)
            else:
                weight.add_(0.3 * torch.randn_like(weight))
