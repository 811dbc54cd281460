"""Weights that are quantized at load answer as plain ones with the values of their codes."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams
from baton_kernels.cpu.quantized_weight import quantize
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.engines import load, mostly_slow, tokens
from tests.support.engine.images import (
    IMAGE_TOKEN,
    greedy,
    image,
    save_vision_language,
    share_processor,
    words,
)
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import NUM_TOKENS
from tests.support.engine.quantisation import GREEDY as GREEDY_OVER_FP8
from tests.support.engine.quantisation import check, decided
from tests.support.engine.quantized.answers import assert_answers
from tests.support.engine.quantized.written import is_of_layer

pytestmark = pytest.mark.system  # a C compiler

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
BITS = {"int8": 8, "int4": 4}


def save_values(plain: Path, folder: Path, quantization: str) -> str:
    """Writes a plain checkpoint with the values of another one's codes. The head, which may be the
    embedding too, has 8 bits."""
    weights = load_file(plain / "model.safetensors")
    head = "lm_head.weight" if any("lm_head" in name for name in weights) else "embed_tokens.weight"
    for name, weight in weights.items():
        is_head = name.endswith(head)
        if is_head or is_of_layer(name, weight):
            weights[name] = quantize(weight, 8 if is_head else BITS[quantization], 32).numbers()
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama", "int8"),
        ("llama", "int4"),
        ("llama_biased", "int8"),
        ("qwen2", "int4"),
        ("qwen3", "int8"),
        pytest.param("llama_biased", "int4", marks=pytest.mark.nightly),
        pytest.param("qwen2", "int8", marks=pytest.mark.nightly),
        pytest.param("qwen3", "int4", marks=pytest.mark.nightly),
    ],
)
def test_model_quantized_at_load_answers_as_transformers(
    family: str, quantization: str, tmp_path: Path, oracle: Oracle
) -> None:
    save_random(FAMILIES[family](), tmp_path / "plain")
    meant = save_values(tmp_path / "plain", tmp_path / "meant", quantization)
    assert_answers(str(tmp_path / "plain"), oracle, meant, quantization=quantization)


@pytest.mark.parametrize("quantization", mostly_slow(BITS, "int8"))
def test_fp8_cache_rounds_kv_of_weights_quantized_at_load(
    quantization: str, tmp_path: Path
) -> None:
    save_random(FAMILIES["llama"](), tmp_path / "plain")
    meant = save_values(tmp_path / "plain", tmp_path / "meant", quantization)
    engine, other = (
        load(str(tmp_path / "plain"), quantization=quantization, kv_cache_dtype=dtype)
        for dtype in ("fp8_e4m3", "auto")
    )
    check(engine, other, decided(meant, (5, 17, 39), GREEDY_OVER_FP8.max_tokens, {}))


@pytest.mark.parametrize("quantization", mostly_slow(BITS, "int4"))
@pytest.mark.parametrize("family", mostly_slow(["llava_clip", "qwen3_vl"], "llava_clip"))
def test_vision_language_model_quantized_at_load_answers(
    family: str, quantization: str, tmp_path: Path
) -> None:
    """The encoder stays as it is."""
    plain, meant = tmp_path / "plain", tmp_path / "meant"
    save_vision_language(family, plain)
    save_values(plain, meant, quantization)
    share_processor(plain, meant)
    text, images = f"w3 {IMAGE_TOKEN} {words(5, 1)} {IMAGE_TOKEN} w5", (image(1), image(2))
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 6}
    engine = load(str(plain), quantization=quantization, block_size=4, **limits)
    result = engine.generate([engine.prompt_with_images(text, images)], GREEDY)
    assert tokens(result) == [greedy(str(meant), text, images, NUM_TOKENS)]


def test_quantization_at_load_tells_workers_apart(tmp_path: Path) -> None:
    """KV of unlike weights is not handed over."""
    save_random(FAMILIES["llama"](), tmp_path)
    engines = [load(str(tmp_path), quantization=kind) for kind in ("none", *BITS, "int8")]
    fingerprints = [engine.core.facts.info.fingerprint for engine in engines]
    assert len(set(fingerprints)) == 3
    assert fingerprints[1] == fingerprints[3]


def test_encoder_alone_pairs_with_quantized_decoders(tmp_path: Path) -> None:
    save_vision_language("llava_clip", tmp_path)
    whole, only = (
        load(str(tmp_path), quantization="int8", encoder_only=alone).core.facts.info
        for alone in (False, True)
    )
    assert only.fingerprint == whole.fingerprint


def test_weights_of_odd_sizes_stay_plain(tmp_path: Path) -> None:
    """Codes are packed by eight inputs, of which the second projection has 20."""
    config = FAMILIES["llama"]()
    config.intermediate_size = 20
    save_random(config, tmp_path)
    (answer,) = load(str(tmp_path), quantization="int4").generate([[1, 2, 3]], GREEDY)
    assert len(answer.token_ids) == NUM_TOKENS


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("gemma3", {}, r"this Gemma3\w* has none, only plain Llama and .* models do: unset it"),
        ("llama", {"kernels": "torch"}, "kernels is 'torch': unset one of them"),
        ("llama", {"deterministic": True}, "deterministic is True: unset one of them"),
        ("llama", {"dtype": "float16"}, r"and dtype is torch.float16: choose one"),
    ],
)
def test_quantization_at_load_is_refused_by_name(
    family: str, settings: dict, why: str, tmp_path: Path
) -> None:
    save_random(FAMILIES[family](), tmp_path)
    with pytest.raises(InvalidArgumentError, match=why) as refused:
        load(str(tmp_path), quantization="int8", **settings)
    assert refused.value.field == "quantization"
