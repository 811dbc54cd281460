"""Small configurations of every causal language model family of transformers.

A family's default configuration with sizes set by the names of its attributes; families whose sizes
depend on each other in ways of their own are in `_EXCEPTIONS`.
"""

from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.engine.checkpoints import MAX_LEN, VOCAB_SIZE

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_NAMES: dict[int | None, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size shape_vocab_size "
    "pronunciation_vocab_size unpadded_vocab_size audio_vocab_size",
    MAX_LEN: "max_position_embeddings n_positions max_seq_len n_ctx context_length "
    "model_max_length max_target_positions",
    64: "hidden_size d_model n_embd emb_dim embedding_dim lru_width word_embed_proj_dim "
    "input_embedding_size output_embedding_size embedding_size mamba_d_ssm backbone_hidden_size "
    "hidden_size_global out_hidden_size vision_output_dim projector_input_dim "
    "projector_output_dim",
    96: "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim d_ff dim_ff "
    "dff n_inner d_inner feed_forward_size intermediate_size_mlp dense_intermediate_size mlp_dim",
    6: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
    "num_decoder_layers num_encoder_layers",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts "
    "linear_num_value_heads linear_num_heads mamba_n_heads mamba_num_heads n_mamba_heads depth "
    "index_n_heads",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk linear_num_key_heads n_groups",
    1: "n_group topk_group num_expert_group mamba_n_groups",
    16: "head_dim d_kv dim_head swa_head_dim attention_head_size d_head kv_channels mamba_d_head "
    "mamba_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim "
    "qk_nope_head_dim kv_lora_rank hidden_size_per_layer_input laurel_rank mamba_headdim "
    "query_pre_attn_scalar",
    8: "qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size time_step_rank "
    "mamba_dt_rank d_rel index_topk mamba_chunk_size chunk_size",
    12: "v_head_dim",
    24: "q_lora_rank qk_head_dim o_lora_rank",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "shared_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "router_hidden_size",
    9: "sliding_window sliding_window_size local_attention window_size attention_window_size",
    None: "bos_token_id eos_token_id",
}  # fmt: skip
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}

_FULL = "full_attention"
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
_CHUNKED = {"attention_chunk_size": 16, "floor_scale": 8}
_SHARED = {"layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 16,
}
_ASSISTANT = {
    "text_config": {
        "num_kv_shared_layers": 6,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    },
}
_DOTS3 = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 12,
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 50,
    "hc_lowrank": 8,
    "ple_embed_dim": 64,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 2,
    "heads_per_ngram": 2,
}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [2, 5]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {_FULL: _ROTARY}},
    "cwm": {"bos_token_id": 1},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"num_key_value_heads": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "mlp_layer_types": ["dense"] * 6, "adapter_in_dim": 64, "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3,
    "emu3": {"text_config": {"bos_token_id": 1}},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "gpt_neo": {"attention_types": [[["global", "local"], 3]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", _FULL] * 3},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "conv", _FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", _FULL] * 2},
    "llama4": {"text_config": _CHUNKED},
    "llama4_text": _CHUNKED,
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": [_FULL, "minimax_m3_sparse"] * 3},
    "ministral": {"head_dim": 16},
    "ministral3": {"rope_parameters": _SCALED},
    "mllama": {"text_config": {"bos_token_id": 1}},
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2},
    "moshi": {"sliding_window": MAX_LEN},  # its cache of transformers has a window, its mask none
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "roc_bert": {"shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": _SHARED,
    "zamba2": {**_SHARED, "kv_channels": 16, "mamba_headdim": 32},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_config(model_type: str) -> PretrainedConfig:
    """Returns the configuration of a model of at most 6 million parameters."""
    return _small(CONFIG_MAPPING[model_type], _EXCEPTIONS.get(model_type, {}))


def _small(kind: type[PretrainedConfig], changes: dict[str, Any]) -> PretrainedConfig:
    default = vars(_default(kind))
    sizes = {
        name: _SIZES[name] for name in _SIZES.keys() & default.keys() if default[name] is not None
    }
    parts = {
        name: _small(type(part), changes.get(name, {}))
        for name, part in default.items()
        if isinstance(part, PretrainedConfig)
    }
    if "qk_rope_head_dim" in sizes:  # latent attention
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if default.get("head_dim") == default["qk_rope_head_dim"]:
            sizes["head_dim"] = sizes["qk_rope_head_dim"]
    if "is_decoder" in default:
        sizes["is_decoder"] = True
    if (default.get("pad_token_id") or 0) >= VOCAB_SIZE:
        sizes["pad_token_id"] = 0
    return kind(**{**sizes, **changes, **parts})


def _default(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """Returns the default configuration; Gemma 4's assistant refuses its own."""
    if kind.model_type == "gemma4_assistant":
        text = CONFIG_MAPPING["gemma4_text"](**_ASSISTANT["text_config"], num_hidden_layers=6)
        return kind(text_config=text)
    return kind()
