"""Loading of models by transformers: from plain files, quantized ones, or GGUF."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.executor.models.hf import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    loading_in_turn,
)
from baton.engine.executor.models.quantized.checkpoint import checkpoint_weights
from baton.engine.executor.models.quantized.quantized_tensor import Codes, QuantizedTensor
from baton.models.generation_config import GENERATION_CONFIG
from baton.models.quantization import read_quantization, without_quantization
from baton.models.weights import is_gguf, weight_files


def load_pretrained(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    keeps_codes: Callable[[PreTrainedModel], bool],
    **options: Any,
) -> Any:
    """Returns what `from_pretrained` of a class of transformers does for the checkpoint in a
    folder, with plain weights where that has others. Raises `UnsupportedModelError` if a weight
    cannot be read.

    Args:
        auto_class: one of transformers' auto classes, which take weights from folders alone.
        keeps_codes: whether weights of layers stay in codes where the checkpoint has them so
            (`QuantizedTensor`), by the model on the meta device.
        options: those of `from_pretrained`, `dtype` among them.
    """
    folder = Path(path)
    if read_quantization(folder) is None and not is_gguf(weight_files(folder)):
        return auto_class.from_pretrained(path, config=config, **options)
    plain = deepcopy(config)
    without_quantization(plain)
    with torch.device("meta"):
        model = auto_class.from_config(plain)
    if not isinstance(plain, model.config_class):
        plain = plain.get_text_config()
    if (folder / GENERATION_CONFIG).is_file():
        options["generation_config"] = GenerationConfig.from_pretrained(path)
    dtype, are_kept = options["dtype"], keeps_codes(model)
    with _plain_weights(folder, model, dtype) as weights:
        if are_kept:
            names = _layers(model) & weights.keys()
            weights = {**weights, **{n: _KeptQuantized(weights[n], dtype) for n in names}}
        return type(model).from_pretrained(None, config=plain, state_dict=weights, **options)


@dataclass(frozen=True, slots=True)
class _KeptQuantized:
    """Weight that stays in codes if it has any that products take."""

    weight: Any
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        codes: Codes | None = self.weight.codes()
        if codes is None:
            plain: torch.Tensor = self.weight[index]
            return plain
        return QuantizedTensor(codes, self.dtype)


def _layers(model: PreTrainedModel) -> set[str]:
    """Returns the names of the weights of linear layers and embeddings."""
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    return {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, kinds)}


@contextmanager
def _plain_weights(
    folder: Path, model: PreTrainedModel, dtype: torch.dtype
) -> Iterator[Mapping[str, Any]]:
    """Gives the weights of `model` by their names, which are computed when they are taken."""
    files = weight_files(folder)
    if is_gguf(files):
        from baton.engine.executor.models.quantized.gguf import gguf_weights

        yield gguf_weights(files, model, dtype)
    else:
        with checkpoint_weights(folder, read_quantization(folder)) as weights, loading_in_turn():
            yield weights
