"""Loading of models by transformers, from plain files or from the weights of quantized ones."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from baton.engine.executor.models.hf import GenerationConfig, PretrainedConfig, loading_in_turn
from baton.engine.executor.models.quantized.checkpoint import checkpoint_weights
from baton.models.quantization import Quantization, read_quantization, without_quantization

_GENERATION = "generation_config.json"


def load_pretrained(auto_class: Any, path: str, config: PretrainedConfig, **options: Any) -> Any:
    """Returns what `from_pretrained` of a class of transformers does for the checkpoint in a
    folder, with plain weights where that has quantized ones. Raises `UnsupportedModelError` if a
    weight cannot be read.

    Args:
        auto_class: one of transformers' auto classes.
        options: those of `from_pretrained`.
    """
    quantization = read_quantization(Path(path))
    if quantization is None:
        return auto_class.from_pretrained(path, config=config, **options)
    return _load_quantized(auto_class, Path(path), config, quantization, options)


def _load_quantized(
    auto_class: Any,
    folder: Path,
    config: PretrainedConfig,
    quantization: Quantization,
    options: dict[str, Any],
) -> Any:
    plain = deepcopy(config)
    without_quantization(plain)
    with torch.device("meta"):  # an auto class itself takes weights from folders alone
        model_class: Any = type(auto_class.from_config(plain))
    if not isinstance(plain, model_class.config_class):
        plain = plain.get_text_config()
    generation = None
    if (folder / _GENERATION).is_file():
        generation = GenerationConfig.from_pretrained(str(folder))
    with checkpoint_weights(folder, quantization) as weights, loading_in_turn():
        return model_class.from_pretrained(
            None, config=plain, state_dict=weights, generation_config=generation, **options
        )
