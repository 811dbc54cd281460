"""Support of checkpoints: what Baton cannot serve by a checkpoint's description.

Reads its JSON files and the names of its other files; no weights, and no code of the checkpoint.
Knows nothing of torch: `baton up` refuses a model here before it starts a process.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import UnsupportedModelError
from baton.models import DESCRIPTION, checkpoint_folder, locate, read_json, tokenizer_file
from baton.models.quantization import check_quantization, quantization_of, read_quantization
from baton.models.weights import check_is_no_adapter, check_weights

CONFIG = "config.json"


def check_model(model: str) -> None:
    """Raises `UnsupportedModelError` for a model that no worker can serve by its description.

    `model`: "tiny", a folder, or a hub id, of which this fetches the description alone.
    """
    folder = checkpoint_folder(model, DESCRIPTION)
    check_description(folder)
    if folder == Path(locate(model)):
        check_weights(folder)


def check_has_tokenizer(model: str) -> None:
    """Raises `UnsupportedModelError` for a model without a tokenizer, which a router needs, as
    `check_model` reads it."""
    tokenizer_file(checkpoint_folder(model, DESCRIPTION))


def check_has_encoder(model: str) -> None:
    """Raises `UnsupportedModelError` for a model without an encoder, as `check_model` reads it."""
    config = read_json(checkpoint_folder(model, DESCRIPTION) / CONFIG)
    if "vision_config" not in config:
        raise UnsupportedModelError(
            f"{_architecture(config)} has no encoder; expected a vision-language model for encode "
            "workers: start none, or choose another model"
        )


def check_description(folder: Path) -> None:
    """Raises `UnsupportedModelError` if the files that describe a checkpoint rule it out."""
    check_is_no_adapter(folder)
    config = read_json(folder / CONFIG)
    check_config(config)
    check_quantization(read_quantization(folder), _architecture(config))
    _check_code(config)


def check_config(config: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModelError` for the configuration of weights that are quantized by a
    method that Baton does not read, or of an encoder-decoder model."""
    check_quantization(quantization_of(config), _architecture(config))
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{_architecture(config)} is an encoder-decoder model; Baton serves decoder-only "
            "models: choose a causal language model"
        )


def _check_code(config: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModelError` for a model whose classes are code in the checkpoint."""
    own = config.get("auto_map")
    if not own:
        return
    # Imported for such checkpoints alone: it takes seconds where torch is installed.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        named = ", ".join(map(str, own.values())) if isinstance(own, Mapping) else own
        raise UnsupportedModelError(
            f"{_architecture(config)} needs code of its checkpoint ({named}), which Baton never "
            f"runs, and this transformers has no model type {model_type!r}: upgrade it if a later "
            "one has, or choose another model"
        )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [config.get("model_type") or "the model"]
    return str(names[0])
