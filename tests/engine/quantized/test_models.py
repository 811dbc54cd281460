"""Quantized checkpoints answer as plain ones with their values, in every kind of model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import InvalidArgumentError, UnsupportedModelError
from baton.sampling import SamplingParams
from tests.support.engine.engines import load, mostly_slow, tokens
from tests.support.engine.fingerprints import fingerprint_of
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, words
from tests.support.engine.oracle import Oracle
from tests.support.engine.pooled import save_scorer
from tests.support.engine.prompts import NUM_TOKENS, awkward_prompts, random_prompt
from tests.support.engine.quantized import bitsandbytes
from tests.support.engine.quantized.answers import assert_answers
from tests.support.engine.quantized.by_transformers import load_plain
from tests.support.engine.quantized.formats import BY_TRANSFORMERS, FORMATS, Packed, by_lanes
from tests.support.engine.quantized.written import save_quantized

State = dict[str, torch.Tensor]
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


@pytest.mark.parametrize("name", mostly_slow(["fp8 in blocks", "awq", "w4a16"], "awq"))
def test_vision_language_model_answers_when_quantized(quantized: Packed, name: str) -> None:
    path, meant = quantized(name, "llava_clip")
    text, images = f"w3 {IMAGE_TOKEN} {words(5, 1)} {IMAGE_TOKEN}", (image(1), image(2))
    engine = load(path, block_size=4, max_num_batched_tokens=24, max_num_seqs=6)
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


def test_fp8_cache_has_the_effect_of_a_plain_model(quantized: Packed) -> None:
    prompts = awkward_prompts()
    of_packed, of_meant = (
        tokens(load(path, kv_cache_dtype="fp8_e4m3").generate(prompts, GREEDY))
        for path in quantized("gptq in act-order", "llama")
    )
    assert of_packed == of_meant


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
