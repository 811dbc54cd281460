"""Weights that are quantized at load answer as plain ones with the values of their codes."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.errors import InvalidArgumentError
from baton.sampling import SamplingParams
from baton_kernels.cpu.quantized_weight import quantize
from tests.support.engine.checkpoints import FAMILIES, save_random
from tests.support.engine.engines import load
from tests.support.engine.images import save_vision_language
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import NUM_TOKENS
from tests.support.engine.quantized.answers import assert_answers

pytestmark = pytest.mark.system  # a C compiler

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
BITS = {"int8": 8, "int4": 4}


def save_values(plain: Path, folder: Path, quantization: str) -> str:
    """Writes a plain checkpoint with the values of another one's codes. The head, which may be the
    embedding too, has 8 bits."""
    weights = load_file(plain / "model.safetensors")
    is_tied = json.loads((plain / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]
    head = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    for name, weight in weights.items():
        if name.endswith("proj.weight") or name == head:
            bits = 8 if name == head else BITS[quantization]
            weights[name] = quantize(weight, bits, 32).numbers()
    folder.mkdir()
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
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
