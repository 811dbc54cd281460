"""Configuration of a GGUF model, as `config.json` has it. Guesses nothing: a setting of the file
that has no place in it is refused by name."""

import struct
from collections.abc import Mapping
from math import isclose, pi, prod
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models.gguf.families import Family, family_of
from baton.models.gguf.header import GgufHeader, GgufTensor

ROPE_FACTORS = "rope_freqs.weight"
"""Tensor that divides rotary frequencies, of Llama 3.1 and later."""

EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
_LONG_ROPE = "rope_factors_long.weight"
_TOKENS = "tokenizer.ggml.{}_token_id"
_SAMPLING = "general.sampling."
_SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_REQUIRED = ("attention.head_count", "block_count", "context_length", "embedding_length")
# They change nothing, or are read together with others.
_READ = (
    *("vocab_size", "attention.value_length", "attention.key_length", "rope.dimension_count"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "attention.causal"),
    *("attention.head_count_kv", "expert_count", "tensor_data_layout"),
)
_NONE_IF_ZERO = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Lengths that models with `ROPE_FACTORS` may have had before they were extended.
_ORIGINAL_LENGTHS = tuple(2**n for n in range(13, 4, -1)) + tuple(2**n for n in range(14, 21))


def configuration(header: GgufHeader) -> dict[str, Any]:
    """Returns the content of `config.json`. Raises `UnsupportedModelError` for a family that is not
    read, and for settings that its configuration has no place for."""
    family = family_of(header.architecture)
    prefix = f"{header.architecture}."
    settings = {
        key.removeprefix(prefix): value
        for key, value in header.metadata.items()
        if key.startswith(prefix)
    }
    _check_all_read(settings, family, header)
    named = {
        name: _uniform(key, settings[key], header)
        for key, name in family.names.items()
        if key in settings
    }
    head_dim = _head_dim(settings)
    named |= {name: None for name in _NONE_IF_ZERO if named.get(name) == 0}
    if family.num_layers_of_largest is not None:
        is_largest = settings["block_count"] == family.num_layers_of_largest
        per_head = settings["embedding_length"] // settings["attention.head_count"]
        named["query_pre_attn_scalar"] = per_head if is_largest else head_dim
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        **family.constants,
        **named,
        **_rope(settings, family, header, head_dim),
        **_token_ids(header.metadata),
        "vocab_size": header.tensors[EMBEDDINGS].shape[0],
        "tie_word_embeddings": OUTPUT not in header.tensors,
        "dtype": _dtype(header),
    }


def generation(header: GgufHeader) -> dict[str, Any]:
    """Returns the content of `generation_config.json`: the sampling that the model's authors
    recommend; empty if the file has none."""
    named = {_SAMPLING + key: name for key, name in _SAMPLING_NAMES.items()}
    return {name: header.metadata[key] for key, name in named.items() if key in header.metadata}


def _dtype(header: GgufHeader) -> str:
    """Returns the dtype in which devices that multiply it compute by default: that of the matrices,
    if they are not quantized."""
    kinds = {tensor.stored_as.name for tensor in header.tensors.values()} - {"F32"}
    return "float32" if not kinds else "float16" if kinds == {"F16"} else "bfloat16"


def _check_all_read(settings: Mapping[str, Any], family: Family, header: GgufHeader) -> None:
    missing = [key for key in _REQUIRED if not settings.get(key)]
    missing += [EMBEDDINGS] if EMBEDDINGS not in header.tensors else []
    if missing:
        raise UnsupportedModelError(
            f"{str(header.files[0])!r} lacks {missing[0]}; download it again, or another file"
        )
    for key, value in sorted(settings.items()):
        if value and key not in family.names and key not in _READ:
            raise _refused(header, key, value)
    if settings.get("expert_count") and "expert_count" not in family.names:
        raise _refused(header, "expert_count", settings["expert_count"])


def _refused(header: GgufHeader, key: str, value: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{str(header.files[0])!r} sets {header.architecture}.{key} to {value!r}, which Baton does "
        "not read from GGUF; give the original checkpoint, a folder or a hub id"
    )


def _uniform(key: str, value: Any, header: GgufHeader) -> Any:
    """Returns a setting that a file may have for each layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise _refused(header, key, value)
    return value[0]


def _head_dim(settings: Mapping[str, Any]) -> int:
    own = settings.get("attention.key_length")
    return int(own or settings["embedding_length"] // settings["attention.head_count"])


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the special tokens; the ends of a turn and of a message end a text as well."""
    ends = [metadata.get(_TOKENS.format(name)) for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": metadata.get(_TOKENS.format("bos")),
        "eos_token_id": known[0] if len(known) == 1 else known or None,
        "pad_token_id": metadata.get(_TOKENS.format("padding")),
    }


def _rope(
    settings: Mapping[str, Any], family: Family, header: GgufHeader, head_dim: int
) -> dict[str, Any]:
    if family.rotated == "none":
        return {}
    value_dim = settings.get("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise _refused(header, "attention.value_length", value_dim)
    if _LONG_ROPE in header.tensors:
        raise UnsupportedModelError(
            f"{str(header.files[0])!r} has rotary factors of two lengths ({_LONG_ROPE}), which "
            "depend on the longest position in the batch; they are not implemented"
        )
    base = float(settings.get("rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_theta": base, **_scaling(settings, header)}
    num_rotated = settings.get("rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        if family.rotated == "all":
            raise _refused(header, "rope.dimension_count", num_rotated)
        rope["partial_rotary_factor"] = num_rotated / head_dim
    if ROPE_FACTORS in header.tensors:
        rope |= _llama3(_values(header.tensors[ROPE_FACTORS]), base, header)
    if family.model_type == "gemma3_text":
        local = float(settings.get("rope.freq_base_swa", 10000.0))
        sliding = {"rope_type": "default", "rope_theta": local}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}}
    if settings.get("rope.freq_base_swa"):
        raise _refused(header, "rope.freq_base_swa", settings["rope.freq_base_swa"])
    return {"rope_parameters": rope}


def _scaling(settings: Mapping[str, Any], header: GgufHeader) -> dict[str, Any]:
    kind = settings.get("rope.scaling.type", "none")
    factor = float(settings.get("rope.scaling.factor", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = settings.get("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise _refused(header, "rope.scaling.type", kind)


def _llama3(factors: tuple[float, ...], base: float, header: GgufHeader) -> dict[str, Any]:
    """Returns the parameters of which `factors` are made. The rule is that of Llama 3.1, in
    `_compute_llama3_parameters` of transformers."""
    if all(factor == 1.0 for factor in factors):
        return {}
    found = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    for length in _ORIGINAL_LENGTHS:
        expected = _llama3_factors(len(factors), base, max(factors), length)
        if all(isclose(f, e, rel_tol=1e-3) for f, e in zip(factors, expected, strict=True)):
            return {**found, "original_max_position_embeddings": length}
    raise UnsupportedModelError(
        f"{str(header.files[0])!r} has rotary factors ({ROPE_FACTORS}) that are not those of "
        "Llama 3.1; give the original checkpoint, a folder or a hub id"
    )


def _llama3_factors(count: int, base: float, factor: float, length: int) -> list[float]:
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = [length / (2 * pi * base ** (n / count)) for n in range(count)]
    shares = [min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns]
    return [1 / ((1 - share) / factor + share) for share in shares]


def _values(tensor: GgufTensor) -> tuple[float, ...]:
    """Returns the values of a tensor of float32."""
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.start)
        content = opened.read(tensor.num_bytes)
    return struct.unpack(f"<{prod(tensor.shape)}f", content)
