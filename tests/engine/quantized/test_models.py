"""Quantized checkpoints answer as plain ones with their values, in every kind of model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.executor.models.fused_model import FusedModel
from baton.engine.executor.models.transformers_model import TransformersModel
from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.sampling import SamplingParams
from tests.support.engine.engines import load, mostly_slow, tokens
from tests.support.engine.fingerprints import fingerprint_of
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, words
from tests.support.engine.oracle import Oracle
from tests.support.engine.pooled import save_scorer
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.engine.quantisation import add_scales, check, decided
from tests.support.engine.quantized import bitsandbytes
from tests.support.engine.quantized.answers import assert_answers
from tests.support.engine.quantized.by_transformers import load_plain
from tests.support.engine.quantized.codes import in_codes, loaded, save_numbers
from tests.support.engine.quantized.formats import BY_TRANSFORMERS, FORMATS, Packed, by_lanes
from tests.support.engine.quantized.written import save_quantized
from tests.support.grids import grid

State = dict[str, torch.Tensor]
MODULES = {
    **dict.fromkeys(["llama_biased", "mistral_short", "qwen2", "qwen3"], FusedModel),
    **dict.fromkeys(["gemma2", "mixtral", "qwen3_moe", "deepseek_v3"], TransformersModel),
}
VISION = {
    **dict.fromkeys(["llava_clip", "internvl", "mistral3", "qwen2_5_vl", "qwen3_vl"], FusedModel),
    **dict.fromkeys(["gemma3", "llava_clip_gelu"], TransformersModel),
}
# Of K and V by layer: some numbers are clipped.
KV_SCALES = {
    (layer, kind): torch.tensor([0.3 + 0.2 * layer + (kind == "v")])
    for layer in range(3)
    for kind in "kv"
}
SCALE_NAME = "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"
READ = [name for name in (*BY_TRANSFORMERS, *bitsandbytes.FORMATS) if name in FORMATS]
QUICK = ("gptq in act-order", "w4a16", "nf4 doubly")
OFTEN = ("awq", "w8a8", "int8", "modelopt nvfp4")
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def by_transformers() -> Oracle:
    return Oracle(load_plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", by_lanes(READ, ["fp8 in blocks"], ["mxfp8", "nf4"]))
def test_plain_weights_answer_as_transformers_reads_them(
    quantized: Packed, by_transformers: Oracle, name: str
) -> None:
    path, _ = quantized(name, "llama")
    assert_answers(path, by_transformers, path, kernels="torch")


@pytest.mark.parametrize("name", by_lanes(FORMATS, QUICK, OFTEN))
def test_quantized_model_answers_as_one_with_its_values(
    quantized: Packed, oracle: Oracle, name: str
) -> None:
    """In codes where the format has them (`test_codes.py` has what their numbers are)."""
    path, numbers = quantized.with_codes(name, "llama")
    assert_answers(path, oracle, numbers)


def test_experts_in_mxfp4_answer_as_transformers(quantized: Packed, oracle: Oracle) -> None:
    path, _ = quantized("mxfp4", "gpt_oss")
    assert_answers(path, oracle, path)


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
    quantized: Packed, tmp_path: Path, change: Callable[[State], object], why: str
) -> None:
    path = changed(quantized("fp8 in blocks", "llama")[0], tmp_path / "changed", change)
    with pytest.raises(UnsupportedModelError, match=why):
        load(path)


SCALES = {
    "awq": ".scales",
    "w4a16": ".weight_scale",
    "w8a8": ".weight_scale",
    "fp8 by channels": ".weight_scale",
    "modelopt nvfp4": ".weight_scale",
    "nf4 doubly": ".weight.absmax",
    "int8": ".SCB",
}


@pytest.mark.system  # a C compiler: the weights stay in codes
@pytest.mark.parametrize("name", SCALES)
def test_loader_refuses_codes_whose_scales_are_cut(
    quantized: Packed, tmp_path: Path, name: str
) -> None:
    scales = UP.removesuffix(".weight") + SCALES[name]

    def cut_scales(tensors: State) -> None:
        tensors[scales] = tensors[scales][:-1].contiguous()

    path = changed(quantized(name, "llama")[0], tmp_path / "changed", cut_scales)
    with pytest.raises(UnsupportedModelError, match=f"weight {UP} do not fit together"):
        load(path)


def test_fingerprint_tells_quantized_weights_apart(quantized: Packed, tmp_path: Path) -> None:
    path, meant = quantized("fp8 in blocks", "llama")
    other = changed(path, tmp_path / "other", lambda t: t[f"{UP}_scale_inv"].mul_(2))
    assert len({fingerprint_of(each) for each in (path, meant, other)}) == 3
    assert fingerprint_of(path) == fingerprint_of(path)


@grid(
    family=mostly_slow(MODULES, "qwen3", "mixtral"),
    name=mostly_slow(["awq", "w8a8", "fp8 in blocks", "nf4"], "awq"),
)
def test_quantized_model_runs_in_the_modules_of_a_plain_one(
    quantized: Packed, oracle: Oracle, family: str, name: str
) -> None:
    path, numbers = quantized.with_codes(name, family)
    for each in (path, numbers):
        assert type(load(each).core.runner.model) is MODULES[family]
    assert_answers(path, oracle, numbers)


@pytest.mark.system  # a C compiler: the weights stay in codes
def test_fused_projection_has_parts_of_unlike_formats(
    quantized: Packed, oracle: Oracle, tmp_path: Path
) -> None:
    """Q in 4 bits, K in 8, V plain; gate in 4 bits and up in floats of 8."""
    formats = {"k_proj": "w8a16", "up_proj": "fp8 by channels"}
    others = {part: quantized(name, "llama") for part, name in formats.items()}
    others["v_proj"] = quantized("w4a16", "llama")[1:] * 2
    mixed = []
    for role, path in enumerate(quantized("w4a16", "llama")):
        folder = Path(shutil.copytree(path, tmp_path / str(role)))
        tensors = load_file(folder / "model.safetensors")
        for part, folders in others.items():
            other = load_file(Path(folders[role]) / "model.safetensors")
            tensors = {n: t for n, t in tensors.items() if f".{part}." not in n}
            tensors |= {n: t for n, t in other.items() if f".{part}." in n}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        mixed.append(str(folder))
    assert len(in_codes(loaded(mixed[0]))) == 3 * 6
    assert_answers(mixed[0], oracle, save_numbers(mixed[0], tmp_path / "numbers", mixed[1]))


@grid(
    family=mostly_slow(VISION, "llava_clip", "qwen2_5_vl"),
    name=mostly_slow(["awq", "w8a8", "fp8 in blocks", "nf4"], "awq"),
)
def test_vision_language_model_answers_when_quantized(
    quantized: Packed, family: str, name: str
) -> None:
    path, meant = quantized(name, family)
    text, images = f"w3 {IMAGE_TOKEN} {words(5, 1)} {IMAGE_TOKEN} w5", (image(1), image(2))
    engine = load(path, block_size=4, max_num_batched_tokens=24, max_num_seqs=6)
    assert type(engine.core.runner.model) is VISION[family]
    result = engine.generate([engine.prompt_with_images(text, images)], GREEDY)
    assert tokens(result) == [greedy(meant, text, images, NUM_TOKENS)]


def test_encoder_is_loaded_alone_from_a_quantized_model(quantized: Packed) -> None:
    path, _ = quantized("awq", "llava_clip")
    whole, only = (load(path, encoder_only=alone).core.facts.info for alone in (False, True))
    assert (only.fingerprint, only.images) == (whole.fingerprint, whole.images)


def test_scores_of_a_quantized_model_equal_its_values(tmp_path: Path) -> None:
    save_scorer("qwen3", tmp_path / "plain")
    meant = save_quantized(FORMATS["w4a16"], tmp_path / "plain", tmp_path / "packed")
    prompts = [random_prompt(9), random_prompt(31)]
    packed, plain = (
        load(str(path), kernels="torch").pool(prompts) for path in (tmp_path / "packed", meant)
    )
    assert np.array_equal(packed, plain)


@grid(
    family=mostly_slow(["llama", "qwen3", "mixtral"], "llama"),
    name=mostly_slow(["gptq in act-order", "w4a16", "w8a8", "fp8 in blocks", "nf4"], "w4a16"),
)
def test_fp8_cache_rounds_kv_of_a_quantized_model(
    quantized: Packed, tmp_path: Path, family: str, name: str
) -> None:
    """By the scales that the checkpoint has beside its codes."""
    plain, numbers = quantized.with_codes(name, family)
    path = add_scales(plain, tmp_path / "scaled", KV_SCALES, SCALE_NAME)
    engine = load(path, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=17, max_num_seqs=3)
    check(engine, load(path), decided(numbers, (5, 17, 39), 8, KV_SCALES))


def test_deterministic_mode_needs_a_gpu_for_codes_too(quantized: Packed) -> None:
    path, _ = quantized("awq", "llama")
    with pytest.raises(InvalidArgumentError, match="which needs Triton's kernels; they run on a"):
        load(path, deterministic=True)


def test_modelopt_is_read_from_its_own_file(
    quantized: Packed, oracle: Oracle, tmp_path: Path
) -> None:
    path, meant = quantized("modelopt nvfp4", "llama")
    folder = tmp_path / "changed"
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    own = {"producer": {"name": "modelopt"}, "quantization": described}
    (folder / "hf_quant_config.json").write_text(json.dumps(own), encoding="utf-8")
    assert_answers(str(folder), oracle, meant)
