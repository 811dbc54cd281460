"""GGUF files in the engine: weights, tokens and log-probabilities as transformers has them."""

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import PreTrainedModel

from baton.engine.executor.models import loader
from baton.models import checkpoint_folder
from baton.models.gguf.tensor_types import TENSOR_TYPES
from tests.support.daily_cases import daily_cases
from tests.support.engine.checkpoints import small_config
from tests.support.engine.engines import config_of, load, mostly_slow, tokens
from tests.support.engine.oracle import Oracle
from tests.support.engine.prompts import NUM_TOKENS, random_prompt
from tests.support.engine.quantized.answers import GREEDY, assert_answers
from tests.support.engine.quantized.formats import by_lanes
from tests.support.engine.quantized.sizes import gguf_sizes
from tests.support.engine.quantized.survey import TABLE_OF_GGUF
from tests.support.gguf.models import (
    GGUF_FAMILIES,
    blocks_config,
    random_model,
    read_gguf,
    save_family,
)
from tests.support.gguf.vocabularies import sentence_piece
from tests.support.gguf.writing import TYPES, write_gguf


@pytest.fixture
def of_gguf() -> Oracle:
    return Oracle(read_gguf)


def by_baton(file: Path, dtype: str = "float32") -> PreTrainedModel:
    folder = str(checkpoint_folder(str(file), ()))
    config = loader.load_config(folder)
    return loader.load_model(folder, config, config_of(dtype=dtype), "eager")


def assert_equal_weights(model: PreTrainedModel, other: PreTrainedModel) -> None:
    weights = model.state_dict()
    assert weights.keys() == other.state_dict().keys()
    for name, weight in other.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_gguf_in_every_type_answers_as_transformers(tmp_path: Path, of_gguf: Oracle) -> None:
    file, names = tmp_path / "mixed.gguf", cycle(TYPES)
    write_gguf(file, random_model(blocks_config()), sentence_piece(), lambda _name: next(names))
    theirs = of_gguf.model(str(file))
    assert_equal_weights(by_baton(file), theirs)
    assert_answers(str(file), of_gguf, str(file), theirs.config.vocab_size)


def test_tensor_types_are_those_of_the_package() -> None:
    sizes = {number: (t.name, t.block_size, t.block_bytes) for number, t in TENSOR_TYPES.items()}
    kinds = map(GGMLQuantizationType, sizes)
    assert sizes == {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in kinds}
    assert {t.name for t in TENSOR_TYPES.values()} == set(TYPES)


@pytest.mark.system  # a C compiler: weights stay in codes
@pytest.mark.parametrize("kind", by_lanes(TYPES, ["Q4_K"], ["Q8_0", "IQ4_XS"]))
def test_tensor_type_takes_the_documented_bytes(kind: str, tmp_path: Path) -> None:
    documented = json.loads(TABLE_OF_GGUF.read_text(encoding="utf-8"))
    assert documented.keys() == {*TYPES}
    assert gguf_sizes(kind, tmp_path) == documented[kind]


QUICK = ("llama_llama3_rope", "gemma3")


@pytest.mark.parametrize(
    "family",
    [*QUICK, *daily_cases([family for family in GGUF_FAMILIES if family not in QUICK], 3)],
)
def test_gguf_answers_as_the_model_it_was_made_of(
    family: str, tmp_path: Path, oracle: Oracle
) -> None:
    original, file = save_family(family, tmp_path)
    prompts = [random_prompt(length, vocab_size=390) for length in (5, 70)]
    expected = [oracle(original, prompt, NUM_TOKENS) for prompt in prompts]
    assert tokens(load(file).generate(prompts, GREEDY)) == expected


def test_gguf_of_experts_has_weights_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "experts.gguf"
    # Of experts, transformers takes the size that its class has.
    config = small_config(
        "Qwen3MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2,
        vocab_size=len(sentence_piece().tokens),
    )  # fmt: skip
    write_gguf(file, random_model(config), sentence_piece(), lambda _name: "Q8_0")
    assert_equal_weights(by_baton(file), read_gguf(str(file)))


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"], "bfloat16"))
def test_gguf_weights_are_rounded_once(dtype: str, tmp_path: Path) -> None:
    """Vectors of gemma3 are subtracted from before, which rounding would show."""
    _, file = save_family("gemma3", tmp_path)
    exact, rounded = by_baton(Path(file)), by_baton(Path(file), dtype)
    assert_equal_weights(rounded, exact.to(getattr(torch, dtype)))
