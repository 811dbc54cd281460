"""On a CPU with kernels in C, a prompt's logits are bitwise the same alone and beside others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.sampling import SamplingParams
from tests.support.engine.checkpoints import small_config
from tests.support.engine.engines import load
from tests.support.engine.prompts import random_prompt
from tests.support.engine.quantized.codes import in_codes, loaded
from tests.support.engine.quantized.formats import FORMATS, by_lanes
from tests.support.engine.quantized.written import save_quantized

pytestmark = pytest.mark.system  # a C compiler

SCORED = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=True, top_logprobs=5)
# One step holds all of them: chunks of a prompt are attended in other orders.
LENGTHS = (1, 5, 31, 70)
# Of each kind of codes one, with minima and without; and one whose weights become plain.
ALL_CODES = (
    "awq", "gptq", "w8a8", "w8 asymmetric", "fp8 in blocks", "fp8 by channels", "nf4", "int8",
    "modelopt nvfp4", "gptq in act-order",
)  # fmt: skip


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Wide enough that libraries choose their order of sums by the number of rows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4}
    folder: Path = tmp_path_factory.mktemp("wide")
    config = small_config("LlamaConfig", **sizes, **heads, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
    ids=str,
)
def test_logits_are_bitwise_equal_alone_and_together(wide_model: str, settings: dict) -> None:
    assert_any_batch(wide_model, settings)


@pytest.mark.parametrize("name", by_lanes(ALL_CODES, ["awq"], ["w8a8", "fp8 in blocks", "nf4"]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_logits_are_bitwise_equal_alone_and_together(
    wide_model: str, tmp_path: Path, name: str, dtype: str
) -> None:
    save_quantized(FORMATS[name], Path(wide_model), tmp_path / "packed")
    path = str(tmp_path / "packed")
    assert bool(in_codes(loaded(path, dtype=dtype))) == (name != "gptq in act-order")
    assert_any_batch(path, {"dtype": dtype})


def assert_any_batch(path: str, settings: dict[str, Any]) -> None:
    engine = load(path, prefix_caching=False, num_threads=2, **settings)
    prompts = [random_prompt(length) for length in LENGTHS]
    together = engine.generate(prompts, SCORED)
    for prompt, beside_others in zip(prompts, together, strict=True):
        (alone,) = engine.generate([prompt], SCORED)
        assert alone.completions == beside_others.completions
