"""Small random models of the families that are read from GGUF."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.support.engine.checkpoints import FAMILIES, randomize, small_config
from tests.support.gguf.vocabularies import Vocabulary, sentence_piece
from tests.support.gguf.writing import write_gguf


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Family with what its file has beside the settings that all have."""

    config: Callable[[], PretrainedConfig]
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: Callable[[PreTrainedModel], dict[str, np.ndarray]] = lambda _model: {}


def _of(class_name: str, **changes: Any) -> Callable[[], PretrainedConfig]:
    return lambda: small_config(class_name, **changes)


def _rope_factors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Returns what llama.cpp's conversion writes of Llama 3's scaling."""
    config = model.config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta = config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    return {"rope_freqs.weight": (plain / scaled).numpy()}


_PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

GGUF_FAMILIES = {
    "llama": GgufFamily(FAMILIES["llama"]),
    "llama_llama3_rope": GgufFamily(FAMILIES["llama_llama3_rope"], tensors=_rope_factors),
    "llama_yarn": GgufFamily(
        FAMILIES["llama_yarn"],
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": 64,
        },
    ),
    "llama_tied": GgufFamily(_of("LlamaConfig", tie_word_embeddings=True)),
    "qwen2": GgufFamily(FAMILIES["qwen2"]),
    "qwen3": GgufFamily(FAMILIES["qwen3"]),
    "qwen2_moe": GgufFamily(
        _of(
            "Qwen2MoeConfig", moe_intermediate_size=48, shared_expert_intermediate_size=32,
            num_experts=4, num_experts_per_tok=2,
        )
    ),
    "qwen3_moe": GgufFamily(
        _of(
            "Qwen3MoeConfig", head_dim=16, moe_intermediate_size=48, num_experts=6,
            num_experts_per_tok=3, norm_topk_prob=True,
        )
    ),
    "gemma2": GgufFamily(FAMILIES["gemma2"]),
    "gemma3": GgufFamily(
        _of(
            "Gemma3TextConfig", head_dim=16, sliding_window=9, query_pre_attn_scalar=16,
            num_hidden_layers=7,
        )
    ),
    "phi3": GgufFamily(
        _of("Phi3Config", rope_parameters=_PART, pad_token_id=0), {"phi3.rope.dimension_count": 8}
    ),
    "starcoder2": GgufFamily(_of("Starcoder2Config", use_bias=True)),
    "gpt2": GgufFamily(FAMILIES["gpt2"]),
}  # fmt: skip


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Returns a model with random weights."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    return model


def save_family(name: str, folder: Path) -> tuple[str, str]:
    """Writes a model of a family to a folder, as safetensors and as GGUF; returns both paths."""
    family = GGUF_FAMILIES[name]
    model = random_model(family.config())
    model.save_pretrained(folder / name)
    file = folder / f"{name}.gguf"
    write_gguf(
        file, model, sentence_piece(), metadata=family.metadata, tensors=family.tensors(model)
    )
    return str(folder / name), str(file)


def read_gguf(file: str) -> PreTrainedModel:
    """Returns the model in a file, as transformers reads it."""
    folder, name = Path(file).parent, Path(file).name
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def blocks_config() -> PretrainedConfig:
    """Returns a configuration whose rows are whole blocks of every tensor type."""
    return small_config(
        "LlamaConfig", hidden_size=256, intermediate_size=256, num_hidden_layers=4,
        vocab_size=len(sentence_piece().tokens),
    )  # fmt: skip


def small_gguf(file: Path, vocabulary: Vocabulary | None, **options: Any) -> Path:
    """Writes a model of one layer; `options` are those of `write_gguf`."""
    vocab_size = 32 if vocabulary is None else len(vocabulary.tokens)
    config = small_config("LlamaConfig", num_hidden_layers=1, vocab_size=vocab_size, hidden_size=32)
    write_gguf(file, random_model(config), vocabulary, **options)
    return file
