"""Embeddings and scores of real clusters, whose prefill workers are alone."""

import base64
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from baton.cli.local_cluster import LocalCluster
from baton.models import locate
from tests.support.cluster.checkpoints import VOCAB_SIZE
from tests.support.engine.pooled import (
    add_tokenizer,
    expected_embeddings,
    save_embedding,
    save_scorer,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = ["def add(a, b):", "return a + b", "import os\n" * 20, "x"]
# Prompts of more tokens take several steps.
WORKER_FLAGS = {"num_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 32}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{locate('tiny')}/tokenizer.json")


def ids_of(texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer().encode(text).ids for text in texts]


def cluster_of(folder: Path) -> LocalCluster:
    """A router and one prefill worker."""
    add_tokenizer(folder)
    return LocalCluster(model=str(folder), num_decode=0, worker_flags=WORKER_FLAGS, http_port=0)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("embedder")
    save_embedding("qwen3", folder, vocab_size=VOCAB_SIZE)
    with cluster_of(folder) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("scorer")
    save_scorer("llama", folder, vocab_size=VOCAB_SIZE)
    with cluster_of(folder) as cluster:
        yield cluster


@pytest_asyncio.fixture
async def client(embedder: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{embedder.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_embeddings_equal_those_of_transformers(embedder, client, encoding):
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = await client.embeddings.create(model="", input=TEXTS, **options)
    expected = expected_embeddings(Path(embedder.model), ids_of(TEXTS))
    for one, vector in zip(answer.data, expected, strict=True):
        found = one.embedding
        if isinstance(found, str):
            found = np.frombuffer(base64.b64decode(found), "<f4")
        assert np.abs(np.array(found) - vector.numpy()).max() <= 1e-5
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(map(len, ids_of(TEXTS)))
    assert answer.model == Path(embedder.model).name
