"""Small random models, and what tests of whole engines ask of them."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PretrainedConfig

from baton.engine.llm import LLM
from baton.sampling import SamplingParams
from tests.support.engine.quantized import fp8, grouped_integers

VOCAB_SIZE = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HYBRID = ["sliding_attention", "full_attention"]


def _family(class_name: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: getattr(transformers, class_name)(**{**COMMON, **changes})


# Those of which there is a form on kernels.
KNOWN: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _family("LlamaConfig"),
    "qwen2": _family("Qwen2Config"),
    "qwen3": _family("Qwen3Config", head_dim=80),
    "mistral": _family("MistralConfig", sliding_window=11),
    "gpt_oss": _family(
        "GptOssConfig", sliding_window=9, layer_types=_HYBRID, num_local_experts=5,
        num_experts_per_tok=2,
    ),
    "mixtral": _family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _family(
        "Qwen3MoeConfig", moe_intermediate_size=48, num_experts=6, num_experts_per_tok=3,
        norm_topk_prob=False, decoder_sparse_step=2,
    ),
}  # fmt: skip
# Those that run as transformers has them.
GENERIC: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma2": _family(
        "Gemma2Config", sliding_window=9, layer_types=_HYBRID, query_pre_attn_scalar=64
    ),
    "gemma3": _family(
        "Gemma3TextConfig", sliding_window=9, layer_types=_HYBRID, query_pre_attn_scalar=64
    ),
    "olmo2": _family("Olmo2Config"),
    "cohere2": _family("Cohere2Config", sliding_window=9, layer_types=_HYBRID),
    "granite": _family("GraniteConfig", residual_multiplier=0.7),
    "glm": _family("GlmConfig", attention_bias=True),
    "phi3": _family("Phi3Config"),
    "starcoder2": _family("Starcoder2Config", sliding_window=None),
    "llama_gelu": _family("LlamaConfig", hidden_act="gelu"),
}  # fmt: skip
FAMILIES = KNOWN | GENERIC
# Families whose weights are quantized, which become plain on a GPU.
QUANTIZED = {
    "llama in fp8": ("llama", fp8.FORMATS["fp8 in blocks"]),
    "qwen3 in gptq": ("qwen3", grouped_integers.FORMATS["gptq"]),
    "mixtral in awq": ("mixtral", grouped_integers.FORMATS["awq"]),
}
PROMPTS = [[7], list(range(1, 16)), list(range(3, 20)), list(range(40, 77))]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def tokens(engine: LLM) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]
