"""Quantized checkpoints are loaded as plain models, with the values of transformers."""

import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from bitsandbytes import functional
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import MixtralForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.executor.models import loader
from baton.engine.executor.models.hf import loading_in_turn
from baton.engine.executor.models.quantized.bitsandbytes import packings
from baton.engine.executor.models.quantized.checkpoint import checkpoint_weights
from baton.engine.executor.models.quantized.packing import PackedWeight, StoredTensor
from baton.models.quantization import read_quantization, without_quantization
from tests.support.engine.engines import mostly_slow
from tests.support.engine.quantized import bitsandbytes
from tests.support.engine.quantized.by_transformers import load_plain
from tests.support.engine.quantized.formats import BY_TRANSFORMERS, FORMATS, Packed

State = dict[str, torch.Tensor]


def loaded(path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> State:
    config = EngineConfig(device="cpu", dtype=dtype, kernels="torch")  # those in C take codes
    state: State = loader.load_model(path, loader.load_config(path), config, "eager").state_dict()
    return state


def by_transformers(path: str, dtype: torch.dtype = torch.float32) -> State:
    state: State = load_plain(path, dtype).state_dict()
    return state


def assert_equal(ours: State, theirs: State) -> None:
    """Asserts that weights are equal, and laid out as kernels take them."""
    assert ours.keys() == theirs.keys()
    assert [name for name, weight in ours.items() if not weight.is_contiguous()] == []
    assert [name for name, weight in theirs.items() if not weight.equal(ours[name])] == []


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_have_the_values_they_stand_for(quantized: Packed, name: str) -> None:
    path, meant = quantized(name, "llama")
    assert_equal(loaded(path), by_transformers(meant))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_quantized_weights_equal_those_of_transformers(
    quantized: Packed, name: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    path, _ = quantized(name, "llama_biased")
    assert_equal(loaded(path, dtype), by_transformers(path, getattr(torch, dtype)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", mostly_slow(["mixtral", "qwen3_moe", "deepseek_v3", "gemma3"], "mixtral")
)
@pytest.mark.parametrize("name", ["fp8 in blocks", "w4a16", "fp8 in bfloat16"])
def test_quantized_experts_equal_those_of_transformers(
    quantized: Packed, name: str, family: str
) -> None:
    path, _ = quantized(name, family)
    assert_equal(loaded(path), by_transformers(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", bitsandbytes.FORMATS)
def test_layers_of_bitsandbytes_equal_those_of_transformers(quantized: Packed, name: str) -> None:
    path, _ = quantized(name, "llama_biased")
    assert_equal(loaded(path), by_transformers(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_equal_those_of_transformers(
    quantized: Packed, dtype: Literal["float32", "bfloat16"]
) -> None:
    path, meant = quantized("mxfp4", "gpt_oss")
    ours = loaded(path, dtype)
    assert_equal(ours, by_transformers(path, getattr(torch, dtype)))
    assert_equal(ours, by_transformers(meant, getattr(torch, dtype)))


@pytest.mark.parametrize("name", ["gptq in act-order", "awq"])
@pytest.mark.parametrize("family", mostly_slow(["mixtral", "qwen3_moe"], "qwen3_moe"))
def test_quantized_experts_have_the_values_they_stand_for(
    quantized: Packed, name: str, family: str
) -> None:
    path, meant = quantized(name, family)
    assert_equal(loaded(path), by_transformers(meant))


def test_blocks_of_bitsandbytes_cross_rows_and_end_early() -> None:
    weight = torch.randn(8, 63, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    parts = {"x.weight": packed}
    parts |= {f"x.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    stored = {name: StoredTensor(name, part) for name, part in parts.items()}
    packing, _ = packings({})
    ours = packing.weight(stored["x.weight.quant_map"], stored)[...]
    assert ours.equal(functional.dequantize_4bit(packed, state))


def test_layers_may_have_different_formats(quantized: Packed, tmp_path: Path) -> None:
    mixed = []
    for role in range(2):  # the checkpoint, then the values that it stands for
        first, second = (quantized(name, "llama")[role] for name in ("w4a16", "fp8 by channels"))
        folder = shutil.copytree(first, tmp_path / str(role))
        of_first, of_second = (load_file(Path(p) / "model.safetensors") for p in (first, second))
        kept = {name: t for name, t in of_first.items() if ".layers.1." not in name}
        other = {name: t for name, t in of_second.items() if ".layers.1." in name}
        save_file(kept | other, folder / "model.safetensors", {"format": "pt"})
        mixed.append(str(folder))
    assert_equal(loaded(mixed[0]), by_transformers(mixed[1]))


class Counted:
    """A weight, and the largest number of bytes of all such that were held at a time."""

    held: ClassVar[list[tuple[StorageWeakRef, int]]] = []
    most: ClassVar[int] = 0

    def __init__(self, weight: StoredTensor | PackedWeight) -> None:
        self._weight = weight

    def __getitem__(self, index: Any) -> torch.Tensor:
        value = self._weight[index]
        Counted.held.append((StorageWeakRef(value.untyped_storage()), value.nbytes))
        here = sum(size for storage, size in Counted.held if not storage.expired())
        Counted.most = max(Counted.most, here)
        return value


def test_loading_holds_the_result_and_one_parameter(quantized: Packed) -> None:
    """transformers stacks the matrices of experts: those of one stack are held at a time."""
    path, _ = quantized("fp8 in blocks", "mixtral")
    config = loader.load_config(path)
    quantization = read_quantization(Path(path))
    without_quantization(config)
    with checkpoint_weights(Path(path), quantization) as weights, loading_in_turn():
        given = {name: Counted(weight) for name, weight in weights.items()}
        model = MixtralForCausalLM.from_pretrained(None, config=config, state_dict=given)
    stacks = [weight.nbytes for name, weight in model.named_parameters() if ".experts." in name]
    whole = sum(weight.nbytes for weight in model.parameters())
    assert max(stacks) <= Counted.most <= whole - sum(stacks) + max(stacks)
