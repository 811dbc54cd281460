"""Pooled outputs of the engine against transformers in float32."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from baton.errors import FailedPreconditionError, UnsupportedModelError
from baton.models import locate
from baton.models.pooling import read_pooling
from tests.support.cluster.checkpoints import VOCAB_SIZE
from tests.support.engine.engines import assert_idle, load
from tests.support.engine.pooled import (
    add_tokenizer,
    expected_embeddings,
    expected_logits,
    save_embedding,
    save_scorer,
    write_modules,
)
from tests.support.engine.prompts import random_prompt

PROMPTS = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 40, 90)]
# Prompts of more tokens take several steps, among others.
SMALL_STEPS = {"max_num_batched_tokens": 24, "max_num_seqs": 8}


def assert_close(found, expected):
    for vector, other in zip(found, expected, strict=True):
        assert np.abs(vector - np.asarray(other)).max() <= 1e-5


@pytest.mark.parametrize("mode", ["last", "mean", "first"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_pool_equals_transformers_for_each_mode(tmp_path, family, mode):
    save_embedding(family, tmp_path, mode)
    engine = load(str(tmp_path), **SMALL_STEPS)
    assert_close(engine.pool(PROMPTS), expected_embeddings(tmp_path, PROMPTS, mode))
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_pool_is_the_same_after_a_prefix_hit(tmp_path, mode):
    save_embedding("qwen3", tmp_path, mode)
    engine = load(str(tmp_path), **SMALL_STEPS)
    shared = random_prompt(64, seed=1)
    prompts = [shared, (*shared, 5, 6, 7), (*shared[:33], 8), shared]
    expected = expected_embeddings(tmp_path, prompts, mode)
    for _ in range(2):
        assert_close(engine.pool(prompts), expected)
        assert_close(engine.pool(prompts[1:2]), expected[1:2])


def test_pool_neither_cuts_texts_nor_pads_them(tmp_path):
    save_embedding("qwen3", tmp_path, vocab_size=VOCAB_SIZE)
    add_tokenizer(tmp_path)
    texts = ["import os\n" * 20, "import os"]
    whole = Tokenizer.from_file(f"{locate('tiny')}/tokenizer.json")
    ids = [whole.encode(text).ids for text in texts]
    assert_close(load(str(tmp_path)).pool(texts), expected_embeddings(tmp_path, ids))


def test_pool_leaves_vectors_as_they_are_without_normalize(tmp_path):
    save_embedding("llama", tmp_path, "mean", normalizes=False)
    found = load(str(tmp_path)).pool(PROMPTS)
    assert_close(found, expected_embeddings(tmp_path, PROMPTS, "mean", normalizes=False))
    assert np.linalg.norm(found[0]) != pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_pool_equals_the_classification_head(tmp_path, family):
    save_scorer(family, tmp_path)
    found = load(str(tmp_path), **SMALL_STEPS).pool(PROMPTS)
    assert_close(found, [[logit] for logit in expected_logits(tmp_path, PROMPTS)])


def test_pool_equals_transformers_after_preemptions(tmp_path):
    save_embedding("qwen3", tmp_path, "mean")
    prompts = [random_prompt(90, seed=i) for i in range(4)]
    engine = load(str(tmp_path), num_blocks=9, max_num_batched_tokens=16, max_num_seqs=4)
    assert_close(engine.pool(prompts), expected_embeddings(tmp_path, prompts, "mean"))


def test_engine_refuses_what_a_model_does_not_make(tmp_path, checkpoints):
    save_embedding("qwen3", tmp_path)
    with pytest.raises(FailedPreconditionError, match="makes embeddings and generates no text"):
        load(str(tmp_path)).generate([[1, 2, 3]])
    with pytest.raises(FailedPreconditionError, match="model 'qwen3' has no pooled output"):
        load(checkpoints["qwen3"]).pool([[1, 2, 3]])


def test_read_pooling_refuses_what_is_not_implemented(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    assert read_pooling(tmp_path) is None
    write_modules(tmp_path, "max")
    with pytest.raises(UnsupportedModelError, match="pools by nothing; expected one of"):
        read_pooling(tmp_path)
    write_modules(tmp_path)
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}))
    with pytest.raises(UnsupportedModelError, match="pooling_mode_max_tokens"):
        read_pooling(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match="lists Dense; expected Transformer"):
        read_pooling(tmp_path)
    modules = [{**module, "path": "../elsewhere"} for module in modules[:2]]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match="in a folder beside it"):
        read_pooling(tmp_path)
    config = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="has 2 labels; expected 1"):
        read_pooling(tmp_path)
