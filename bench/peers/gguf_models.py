"""Random models of Qwen 3's shape as GGUF files, which both Baton and llama.cpp read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from transformers import Qwen3Config, Qwen3ForCausalLM

from baton.models import locate

_ARCHITECTURE = "qwen3"
_LENGTH = 4096
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of weights: `matrices` and `embedding`, the head too, by their types in GGUF, and the
    `dtype` that Baton computes in."""

    matrices: str
    embedding: str
    dtype: str


KINDS: Mapping[str, Kind] = {
    "float32": Kind("F32", "F32", "float32"),
    "bfloat16": Kind("BF16", "BF16", "bfloat16"),
    "8 bits": Kind("Q8_0", "Q8_0", "bfloat16"),
    "4 bits": Kind("Q4_0", "Q8_0", "bfloat16"),
}
SIZES: Mapping[str, Mapping[str, int]] = {
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32_000,
    },
    "600M": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
}


def random_model(**sizes: int) -> Qwen3ForCausalLM:
    """Returns a model of these sizes, whose numbers are exact in bfloat16."""
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, max_position_embeddings=_LENGTH, tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


def save(model: Qwen3ForCausalLM, kind: Kind, file: Path) -> None:
    """Writes a model with the tokens of the shipped one, and others that fill its vocabulary."""
    config = model.config
    writer = GGUFWriter(file, _ARCHITECTURE)
    writer.add_context_length(_LENGTH)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_vocabulary(writer, config.vocab_size)
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stored = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if name != "lm_head.weight":
            _add_tensor(writer, stored, weight.float().numpy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, kind: Kind) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    stored_as = GGMLQuantizationType[kind.embedding if name == _EMBEDDING else kind.matrices]
    writer.add_tensor(name, quantize(values, stored_as), raw_dtype=stored_as)


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    content = json.loads((Path(locate("tiny")) / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {i: text for text, i in content["model"]["vocab"].items()}
    control = {token["id"]: token["content"] for token in content["added_tokens"]}
    tokens |= control
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([tokens.get(i, f"<{i}>") for i in range(size)])
    writer.add_token_types(
        [TokenType.CONTROL if i in control else TokenType.NORMAL for i in range(size)]
    )
    merges = content["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
