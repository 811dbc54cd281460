"""Quantized checkpoints are loaded as plain models, with the values of transformers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, MixtralForCausalLM

from baton.engine.config import EngineConfig
from baton.engine.executor.models import loader
from baton.engine.executor.models.hf import loading_in_turn
from baton.engine.executor.models.quantized.checkpoint import checkpoint_weights
from baton.engine.executor.models.quantized.packing import PackedWeight, StoredTensor
from baton.errors import UnsupportedModelError
from baton.models.quantization import read_quantization, without_quantization
from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.engines import assert_idle, load, tokens
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import NUM_TOKENS, awkward_prompts
from tests.support.engine.quantized import bitsandbytes
from tests.support.engine.quantized.formats import BY_TRANSFORMERS, FORMATS, OF_FAMILIES
from tests.support.engine.quantized.written import save_quantized

State = dict[str, torch.Tensor]
Saved = Callable[[str, str], tuple[str, str]]
ALL = FORMATS | OF_FAMILIES["gpt_oss"]


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns, by format and family, a checkpoint and a plain one with the values it stands for."""
    made: dict[tuple[str, str], tuple[str, str]] = {}

    def saved(name: str, family: str = "llama") -> tuple[str, str]:
        if (name, family) not in made:
            root = tmp_path_factory.mktemp("quantized")
            save_random(FAMILIES[family](), root / "plain")
            meant = save_quantized(ALL[name], root / "plain", root / "packed")
            made[name, family] = str(root / "packed"), str(meant)
        return made[name, family]

    return saved


def loaded(path: str, dtype: Literal["float32", "bfloat16"] = "float32") -> State:
    config = EngineConfig(device="cpu", dtype=dtype)
    state: State = loader.load_model(path, loader.load_config(path), config, "eager").state_dict()
    return state


def by_transformers(path: str, dtype: torch.dtype = torch.float32) -> State:
    described = read_quantization(Path(path))
    options: dict[str, Any] = {}
    if described is not None and described.method == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    state: State = model.state_dict()
    return state


def assert_equal(ours: State, theirs: State) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name, weight in theirs.items() if not weight.equal(ours[name])] == []


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_have_the_values_they_stand_for(quantized: Saved, name: str) -> None:
    path, meant = quantized(name, "llama")
    assert_equal(loaded(path), by_transformers(meant))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_quantized_weights_equal_those_of_transformers(
    quantized: Saved, name: str, dtype: Literal["float32", "bfloat16"]
) -> None:
    path, _ = quantized(name, "llama_biased")
    assert_equal(loaded(path, dtype), by_transformers(path, getattr(torch, dtype)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gemma3"])
@pytest.mark.parametrize("name", ["fp8 in blocks", "w4a16", "fp8 by channels"])
def test_quantized_experts_equal_those_of_transformers(
    quantized: Saved, name: str, family: str
) -> None:
    path, _ = quantized(name, family)
    assert_equal(loaded(path), by_transformers(path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", bitsandbytes.FORMATS)
def test_layers_of_bitsandbytes_equal_those_of_transformers(quantized: Saved, name: str) -> None:
    """transformers keeps them in its layers, and has them in float32 by `dequantize`."""
    path, _ = quantized(name, "llama_biased")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).dequantize()
    assert_equal(loaded(path), theirs.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_equal_those_of_transformers(
    quantized: Saved, dtype: Literal["float32", "bfloat16"]
) -> None:
    path, meant = quantized("mxfp4", "gpt_oss")
    ours = loaded(path, dtype)
    assert_equal(ours, by_transformers(path, getattr(torch, dtype)))
    assert_equal(ours, by_transformers(meant, getattr(torch, dtype)))


@pytest.mark.parametrize("name", ["gptq in act-order", "awq"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_quantized_experts_have_the_values_they_stand_for(
    quantized: Saved, name: str, family: str
) -> None:
    path, meant = quantized(name, family)
    assert_equal(loaded(path), by_transformers(meant))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fp8 in blocks", "mxfp8"])
def test_quantized_model_answers_as_transformers(
    quantized: Saved, oracle: Oracle, name: str
) -> None:
    path, _ = quantized(name, "llama")
    assert_answers(path, oracle, path)


@pytest.mark.parametrize(
    "name", ["gptq in act-order", "awq", "w4a16", "w8a8", "nf4 doubly", "int8", "modelopt nvfp4"]
)
def test_quantized_model_answers_as_one_with_its_values(
    quantized: Saved, oracle: Oracle, name: str
) -> None:
    path, meant = quantized(name, "llama")
    assert_answers(path, oracle, meant)


def test_experts_in_mxfp4_answer_as_transformers(quantized: Saved, oracle: Oracle) -> None:
    path, _ = quantized("mxfp4", "gpt_oss")
    assert_answers(path, oracle, path)


def assert_answers(path: str, oracle: Oracle, read: str) -> None:
    """Asserts that a checkpoint's answers are those of transformers with another one: alone, in a
    batch, in chunks, and with prefixes cached."""
    engine = load(path, max_num_batched_tokens=17, max_num_seqs=3)
    prompts = awkward_prompts()
    for _ in range(2):
        results = engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        assert tokens(results) == [oracle(read, p, NUM_TOKENS) for p in prompts]
    assert_idle(engine)


def changed(path: str, folder: Path, change: Callable[[State], object]) -> str:
    """Copies a checkpoint with other tensors."""
    shutil.copytree(path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


UP = "model.layers.1.mlp.up_proj.weight"


def cut(tensors: State) -> None:
    tensors[f"{UP}_scale_inv"] = tensors[f"{UP}_scale_inv"][:-1].contiguous()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop(f"{UP}_scale_inv"), f"{UP}_scale_inv, which they need, is"),
        (cut, rf"weight {UP} do not fit together \({UP} \[96, 64\], {UP}_scale_inv \[11, 8\]\)"),
    ],
    ids=["missing", "cut"],
)
def test_loader_names_scales_that_do_not_fit(
    quantized: Saved, tmp_path: Path, change: Callable[[State], object], why: str
) -> None:
    path = changed(quantized("fp8 in blocks", "llama")[0], tmp_path / "changed", change)
    with pytest.raises(UnsupportedModelError, match=why):
        loaded(path)


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


def test_loading_holds_the_result_and_one_parameter(quantized: Saved) -> None:
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


def test_fingerprint_tells_quantized_weights_apart(quantized: Saved, tmp_path: Path) -> None:
    def fingerprint(path: str) -> bytes:
        return loader.fingerprint(loader.load_config(path), torch.float32, path)

    path, meant = quantized("fp8 in blocks", "llama")
    other = changed(path, tmp_path / "other", lambda t: t[f"{UP}_scale_inv"].mul_(2))
    assert len({fingerprint(each) for each in (path, meant, other)}) == 3
    assert fingerprint(path) == fingerprint(path)
