"""Writer of GGUF files: what llama.cpp's conversion makes of a model of transformers."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFValueType,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import quantize
from transformers import PreTrainedModel

from tests.support.gguf.vocabularies import TEMPLATE, Vocabulary

ARCHITECTURES = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_GATE_UP = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.gate_up_proj")
# Types to which the package quantizes.
_QUANTISED = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip
# Of other types, offsets of the scales in a block; what is else in it may be any bytes.
_HALF = tuple(np.array([0.002], np.float16).tobytes())
_SCALES: dict[str, dict[int, Sequence[int]]] = {
    "Q2_K": {80: _HALF, 82: _HALF},
    "Q3_K": {108: _HALF},
    "Q4_K": {0: _HALF, 2: _HALF},
    "Q5_K": {0: _HALF, 2: _HALF},
    "Q6_K": {208: _HALF},
    **{name: {0: _HALF} for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")},
    **{name: {0: _HALF} for name in ("IQ4_NL", "IQ4_XS")},
    # Four bits of it in each of four words.
    "IQ1_M": {49: (0x90,), 51: (0x10,), 53: (0x80,), 55: (0x10,)},
}
TYPES = (*_QUANTISED, *_SCALES)
"""Names of the tensor types that are written."""

TypeOf = Callable[[str], str]


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    vocabulary: Vocabulary | None = None,
    type_of: TypeOf = lambda _name: "F32",
    metadata: Mapping[str, Any] = {},
    tensors: Mapping[str, np.ndarray] = {},
    **writer_options: Any,
) -> None:
    """Writes a model as llama.cpp's conversion does.

    Args:
        type_of: type of a matrix by its name in GGUF; vectors are float32.
        metadata: further or other keys.
        tensors: further tensors.
        writer_options: of `GGUFWriter`, such as `split_max_tensors`.
    """
    config = model.config.get_text_config()
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(file, architecture, **writer_options)
    for key, value in {**_settings(config, architecture), **metadata}.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            kind = GGUFValueType.UINT32 if isinstance(value, int) else GGUFValueType.FLOAT32
            writer.add_key_value(key, value, kind)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif value is not None:
            writer.add_array(key, value)
    if vocabulary is not None:
        _write_vocabulary(writer, vocabulary)
    for name, values in {**_tensors(model, architecture), **tensors}.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            _write_matrix(writer, name, values, type_of(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settings(config: Any, architecture: str) -> dict[str, Any]:
    found = {key: getattr(config, name, None) for key, name in KEYS.items()}
    if architecture == "gpt2":
        found |= {
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
        }
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" in rope:
        found["rope.freq_base"] = float(rope["rope_theta"])
    return {f"{architecture}.{key}": v for key, v in found.items() if v is not None}


def _write_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for name, token_id in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_chat_template(TEMPLATE)


def _tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    (known,) = (a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(known, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if fused := _GATE_UP.fullmatch(name):
            gate, up = np.split(values, 2, axis=1)
            found[f"blk.{fused[1]}.ffn_gate_exps.weight"] = gate
            found[f"blk.{fused[1]}.ffn_up_exps.weight"] = up
            continue
        base, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, dot, suffix = name, ".", "weight"
        stored = f"{names.get_name(base)}{dot}{suffix}"
        if not (tied and stored == "output.weight"):
            found[stored] = _converted(architecture, stored, values, model.config)
    return found


def _converted(architecture: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Returns values as llama.cpp's conversion changes them."""
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        pairs: np.ndarray = halves.swapaxes(1, 2)
        return pairs.reshape(values.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "gpt2" and re.search(r"(attn_qkv|attn_output|ffn_\w+)\.weight", name):
        return values.T
    if name.endswith("ffn_gate_inp_shexp.weight"):
        return np.squeeze(values, 0)
    return values


def _write_matrix(writer: GGUFWriter, name: str, values: np.ndarray, type_name: str) -> None:
    values = np.ascontiguousarray(values, np.float32)
    kind = GGMLQuantizationType[type_name]
    if kind.name in ("F32", "F16"):
        writer.add_tensor(name, values.astype(np.float16) if kind.name == "F16" else values)
        return
    is_known = type_name in _QUANTISED
    blocks = quantize(values, kind) if is_known else _random_blocks(kind, values.shape)
    writer.add_tensor(name, blocks, raw_dtype=kind)


def _random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """Returns blocks of any bytes with small scales: the package quantizes to few types."""
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    torch.manual_seed(int(kind))
    height, width = int(np.prod(shape[:-1])), shape[-1] // block_size
    blocks = torch.randint(0, 256, (height, width, block_bytes), dtype=torch.uint8).numpy()
    for offset, scale in _SCALES[kind.name].items():
        blocks[..., offset : offset + len(scale)] = scale
    return np.reshape(blocks, (*shape[:-1], width * block_bytes))
