"""Plain checkpoints with the numbers that an engine's codes stand for."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.engine.executor.models import loader
from baton.engine.executor.models.quantized.quantized_tensor import QuantizedTensor
from tests.support.engine.engines import config_of

State = dict[str, torch.Tensor]


def loaded(path: str, **changes: object) -> State:
    """The weights of a checkpoint as an engine has them, some in codes."""
    config = loader.load_config(path)
    state: State = loader.load_model(path, config, config_of(**changes), "eager").state_dict()
    return state


def in_codes(state: State) -> list[QuantizedTensor]:
    return [weight for weight in state.values() if isinstance(weight, QuantizedTensor)]


def save_numbers(path: str, folder: Path, meant: str) -> str:
    """Writes a checkpoint of the numbers that an engine has, beside the other files of `meant`."""
    shutil.copytree(meant, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    plain = {name: weight.clone().contiguous() for name, weight in loaded(path).items()}
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    return str(folder)
