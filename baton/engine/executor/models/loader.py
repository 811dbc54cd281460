"""Checkpoint loader through transformers; refuses an unsupported model with the reason.

It reads only safetensors and runs no code from a checkpoint.
"""

import hashlib
import json
from collections.abc import Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from baton.engine.config import EngineConfig
from baton.engine.executor.cache.kv_scales import FP8
from baton.engine.executor.device import resolve_device, use_device
from baton.engine.executor.kernel_choice import why_no_products_in_c
from baton.engine.executor.models.hf import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    without_load_report,
)
from baton.engine.executor.models.llama_shaped import is_dense
from baton.engine.executor.models.quantized.checkpoint import checkpoint_weights
from baton.engine.executor.models.quantized.loading import load_pretrained
from baton.engine.executor.models.transformers_model import without_head
from baton.engine.executor.models.vision_model import (
    is_vision_language,
    with_meta_decoder,
    without_layers,
)
from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.models import support
from baton.models.images.pixtral import text_tokens
from baton.models.length import longest
from baton.models.pooling import Pooling
from baton.models.quantization import read_quantization
from baton.models.weights import check_complete, check_weights
from baton_kernels.cpu.library import instruction_sets

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # instruction sets that multiply it
_FP8_CAPABILITY = (8, 9)
# Weights of the classification head of transformers' decoders.
_SCORE = "score.weight"
# Rotary factors that depend on the longest position of the batch: chunking would change the output.
_BATCH_DEPENDENT_ROPES = ("dynamic", "longrope")


def load_config(path: str) -> PretrainedConfig:
    """Returns the checkpoint's configuration. Raises `UnsupportedModelError` if unsupported."""
    support.check_description(Path(path))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise UnsupportedModelError(
            f"cannot read a model configuration at {path!r}: {_summary(error)}"
        ) from error
    config.update(text_tokens(Path(path), config.to_dict()))
    support.check_config(config.to_dict())  # with its class's defaults, which the file may omit
    _check_architecture(config)
    check_weights(Path(path))
    return config


def load_model(
    path: str,
    config: PretrainedConfig,
    engine: EngineConfig,
    attention: str,
    pooling: Pooling | None = None,
) -> PreTrainedModel:
    """Returns the model in evaluation mode on its device, with `attention` as its attention
    implementation, of a vision-language model that of its language model; without its head if it
    has a pooled output. With `encoder_only` the language model is on the meta device, and its
    layers and head are not read. Raises `UnsupportedModelError` for weights that are missing or
    unreadable."""
    device = resolve_device(engine.device)
    use_device(device)
    dtype = resolve_dtype(engine.dtype, config, device, instruction_sets())
    resolve_kv_dtype(engine.kv_cache_dtype, dtype, capability(device))  # before much is read
    why_no_products = why_no_products_in_c(engine, device, dtype)
    auto_class: Any = AutoModelForCausalLM
    of_parts, wanted = {"text_config": attention}, config
    if engine.encoder_only:
        auto_class, wanted = AutoModel, without_layers(config)
    elif is_vision_language(config):
        auto_class = AutoModelForImageTextToText
    # Of a model that pools, the language model's head is missing, and that of scores unexpected;
    # so are the layers that an encoder is loaded without.
    is_reported = pooling is None and not engine.encoder_only
    report_of = nullcontext() if is_reported else without_load_report()
    try:
        with report_of:
            loaded: tuple[PreTrainedModel, dict[str, Any]] = load_pretrained(
                auto_class,
                path,
                wanted,
                lambda model: is_dense(model) and why_no_products is None,
                dtype=dtype,
                attn_implementation=of_parts if is_vision_language(config) else attention,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by the weight's name
            )
    except SafetensorError as error:
        raise UnsupportedModelError(f"cannot read the weights at {path!r}: {error}") from error
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        if error.args == (attention,):
            reason = "the model picks its attention from a list of its own; not implemented"
        else:
            reason = f"transformers cannot build the model: {_summary(error)}"
        raise UnsupportedModelError(f"{type(config).__name__}: {reason}") from error
    model, report = loaded
    # transformers initializes missing weights at random instead of failing.
    missing = set(report["missing_keys"])
    if pooling is not None and not engine.encoder_only:
        head = model.get_output_embeddings()
        missing -= {f"{name}.weight" for name, module in model.named_modules() if module is head}
        _check_head(pooling, set(report["unexpected_keys"]))
        model = without_head(model)
    check_complete(path, report["mismatched_keys"], missing)
    model = model.to(device).eval().requires_grad_(False)
    return with_meta_decoder(model, config, of_parts) if engine.encoder_only else model


def check_finite(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` if a weight is no finite number. Reads all of them."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UnsupportedModelError(
                f"the weights {name} of {type(model).__name__} are not all finite numbers; "
                "download the model again"
            )


def score_head(path: str, model: PreTrainedModel) -> torch.Tensor:
    """Returns the weights of the classification head, `[1, hidden_size]`, as `model` has them.
    Raises `UnsupportedModelError` if the checkpoint lacks them."""
    with checkpoint_weights(Path(path), read_quantization(Path(path))) as weights:
        if _SCORE in weights:
            return weights[_SCORE][...].to(model.device, model.dtype)
    raise UnsupportedModelError(f"{path!r} lacks the weights of its classification head, {_SCORE}")


def _check_head(pooling: Pooling, unexpected: set[str]) -> None:
    """Raises `UnsupportedModelError` for a head of more than one matrix."""
    if pooling.kind == "score" and (more := sorted(unexpected - {_SCORE})):
        raise UnsupportedModelError(
            f"the classification head has {', '.join(more[:3])}; expected {_SCORE} alone"
        )


def resolve_dtype(
    name: str, config: PretrainedConfig, device: torch.device, instructions: Set[str]
) -> torch.dtype:
    """Returns the dtype of the weights. "auto" is that of the checkpoint if the device multiplies
    it, which a CPU does by its `instructions`, and float32 else."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    own = getattr(config, "dtype", None)
    if device.type == "cuda":
        return own if own in _DTYPES else torch.float32
    is_native = own == torch.bfloat16 and not _OF_BFLOAT16.isdisjoint(instructions)
    return torch.bfloat16 if is_native else torch.float32


def capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of a GPU; None for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def resolve_kv_dtype(
    name: str, dtype: torch.dtype, capability: tuple[int, int] | None
) -> torch.dtype:
    """Returns the KV cache dtype for a model in `dtype`.

    Raises `InvalidArgumentError` for fp8 on a GPU of a `capability` that cannot convert it.
    """
    if name == "auto":
        return dtype
    if capability is not None and capability < _FP8_CAPABILITY:
        raise InvalidArgumentError(
            "kv_cache_dtype",
            f"is {name!r}, which needs a GPU of compute capability "
            f"{'.'.join(map(str, _FP8_CAPABILITY))} or newer; this one has "
            f"{'.'.join(map(str, capability))}: use --kv-cache-dtype auto there",
        )
    return FP8


def max_model_len(config: PretrainedConfig, engine: EngineConfig) -> int:
    """Returns the maximum number of tokens of one sequence."""
    text = config.get_text_config()
    own: int | None = getattr(text, "max_position_embeddings", None)
    if own is not None:  # below 1: of positions relative to each other
        own = longest(own, getattr(text, "rope_parameters", None)) if own > 0 else None
    wanted = engine.max_model_len
    if own is None and wanted is None:
        raise UnsupportedModelError("the checkpoint names no length; set --max-model-len")
    if own is not None and wanted is not None and wanted > own:
        raise InvalidArgumentError(
            "max_model_len", f"is {wanted}; the model was made for {own} tokens"
        )
    return wanted or own or 1


def fingerprint(config: PretrainedConfig, dtype: torch.dtype, weights: bytes) -> bytes:
    """Returns 16 bytes that hash configuration and dtype of a model, and every byte of its weights,
    loaded or not, of which `weights` are the combined digests."""
    described = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    digest.update(str(dtype).encode())
    digest.update(weights)
    return digest.digest()[:16]


def bound_to(model: bytes, execution: str, version: str) -> bytes:
    """Returns 16 bytes that two workers have in common exactly if their KV is interchangeable.

    Args:
        model: its `fingerprint`.
        execution: name of the model's implementation and of its KV arrangement.
        version: Baton's version, since the meaning of `execution` may differ (ADR 0026).
    """
    named = execution.encode()
    digest = hashlib.sha256(model + len(named).to_bytes(4, "little") + named + version.encode())
    return digest.digest()[:16]


def tokenizer_hash(path: str) -> bytes:
    """Returns 16 bytes that identify the tokenizer; empty if the checkpoint's folder has none."""
    file = Path(path) / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).digest()[:16] if file.is_file() else b""


def eos_token_ids(config: PretrainedConfig, model: PreTrainedModel) -> frozenset[int]:
    """Returns the end-of-sequence tokens of the generation configuration, else of the model's."""
    for source in (model.generation_config, config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def _check_architecture(config: PretrainedConfig) -> None:
    name = (config.architectures or [type(config).__name__])[0]
    if not is_vision_language(config) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"{name} is not a causal language model of transformers: AutoModelForCausalLM has none "
            f"for {type(config).__name__}; choose one of text only"
        )
    text = config.get_text_config()
    if getattr(text, "num_attention_heads", None) in (None, 0):
        raise UnsupportedModelError(
            f"{name} has no attention heads in its configuration: it is recurrent, or made of "
            "several models; not implemented"
        )
    rope = _rope_type(getattr(text, "rope_parameters", None))
    if rope in _BATCH_DEPENDENT_ROPES:
        raise UnsupportedModelError(
            f"{name} uses {rope!r} rotary embeddings, whose factors depend on the longest position "
            "in the batch; they are not implemented"
        )


def _rope_type(parameters: Any) -> str | None:
    """Returns the rotary type; of one per layer type, an unsupported one if there is any."""
    if not isinstance(parameters, dict):
        return None
    if "rope_type" in parameters:
        return str(parameters["rope_type"])
    types = [str(p.get("rope_type")) for p in parameters.values() if isinstance(p, dict)]
    return next((t for t in types if t in _BATCH_DEPENDENT_ROPES), None)


def _summary(error: Exception) -> str:
    """Returns the first two lines of an error of transformers: the second often has the value."""
    return " ".join(line.strip() for line in str(error).strip().split("\n")[:2])
