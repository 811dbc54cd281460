"""Clusters whose decode workers compute all prompts: `baton up --workers 1`, with three models."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from baton import AsyncClient
from baton.cli.checks.cluster import cluster as checks_of
from baton.cli.checks.finding import Level
from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import Image
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import VOCAB_SIZE, is_greedy, prompt_of, reference
from tests.support.cluster.sampling_modes import CODE, WAYS, answer_of, check_same
from tests.support.cluster.watch import until_nothing_is_held
from tests.support.engine.images import IMAGE_TOKEN, image, words
from tests.support.engine.images import greedy as greedy_with_images
from tests.support.engine.pooled import add_tokenizer, expected_embeddings, save_embedding
from tests.support.router.images import encoded, save_checkpoint

pytestmark = pytest.mark.e2e

TINY = locate("tiny")
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a vision-language model and of an embedding model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("pictured", "embedder")}
    save_checkpoint("llava_clip", folders["pictured"])
    save_embedding("qwen3", folders["embedder"], vocab_size=VOCAB_SIZE)
    add_tokenizer(folders["embedder"])
    return folders


@pytest.fixture(scope="module")
def sole(folders: dict[str, Path]) -> Iterator[LocalCluster]:
    """One worker of each model. Prompts come in several chunks."""
    with LocalCluster(
        ",".join(["tiny", *(f"{name}={folder}" for name, folder in folders.items())]),
        num_prefill=0,
        http_port=0,
        worker_flags={"max_num_batched_tokens": 48, "num_blocks": 300},
    ) as cluster:
        yield cluster


@pytest.fixture
async def only(sole: LocalCluster) -> AsyncIterator[AsyncClient]:
    """A client, after which the cluster holds nothing."""
    async with AsyncClient(sole.address) as client:
        yield client
    await until_nothing_is_held(sole)


async def test_one_worker_answers_in_all_ways_as_two_workers(only, client):
    async def asked(of: AsyncClient, name: str) -> tuple[str, object]:
        generation = of.generate(CODE, WAYS[name])
        return await answer_of(generation), (await generation.wait_accepted()).placement

    pairs = [asyncio.gather(asked(only, name), asked(client, name)) for name in WAYS]
    for name, (alone, apart) in zip(WAYS, await asyncio.gather(*pairs), strict=True):
        check_same(name, alone[0], apart[0])
        assert [one[1].prefill_worker for one in (alone, apart)] == ["", "prefill-0"]


SCORED = [(1, {}), (48, {"max_tokens": 1}), (700, {}), (100, {"beam_width": 2})]
SCORED += [(100, {field: 2, "temperature": 1.0}) for field in ("n", "best_of")]


@pytest.mark.parametrize(("length", "fields"), SCORED)
async def test_one_worker_scores_prompt_as_transformers(only, length, fields):
    prompt = prompt_of(length, seed=3)
    expected = reference(TINY)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    params = SamplingParams(**{"max_tokens": 4, "prompt_logprobs": 2, **fields})
    for _ in range(2):  # the second time its beginning is in the cache
        generation = only.generate(prompt, params)
        completions = await generation.completions()
        if params.num_sequences == 1:
            assert is_greedy(TINY, prompt, list(completions[0].token_ids))
        assert len(generation.prompt_logprobs) == length - 1
        for i, scored in enumerate(generation.prompt_logprobs):
            assert scored.logprob == pytest.approx(expected[i, prompt[i + 1]].item(), abs=1e-3)
            assert list(scored.top) == expected[i].topk(2).indices.tolist()


async def test_one_worker_computes_images_as_transformers(only, folders):
    text, images = f"{words(9, 1)} {IMAGE_TOKEN} {words(3, 2)}", [image(1)]
    given = [Image(encoded(one)) for one in images]
    generation = only.generate(text, GREEDY, images=given, model="pictured")
    expected = greedy_with_images(str(folders["pictured"]), text, images, GREEDY.max_tokens)
    assert tuple(await generation.token_ids()) == expected


async def test_one_worker_embeds_and_scores_as_transformers(only, folders):
    texts = ["def add(a, b):", "import os\n" * 20, "x"]
    tokenizer = Tokenizer.from_file(f"{TINY}/tokenizer.json")
    prompts = [tokenizer.encode(text).ids for text in texts]
    expected = np.stack(expected_embeddings(folders["embedder"], prompts))
    found = await only.embed(texts, model="embedder")
    assert np.abs(np.asarray(found.vectors) - expected).max() <= 1e-5
    scores = await only.score([(texts[0], texts[1])], model="embedder")
    assert scores.scores == pytest.approx([expected[0] @ expected[1]], abs=1e-5)


def test_one_worker_serves_http_and_is_ready(sole):
    for endpoint in sole.metrics_endpoints.values():
        assert httpx.get(f"http://{endpoint}/readyz").status_code == 200
    with httpx.Client(base_url=sole.http_address, timeout=60.0) as http:
        prompt = prompt_of(20, seed=4)
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "echo": True}
        (choice,) = http.post("/v1/completions", json={**asked, "logprobs": 1}).json()["choices"]
        assert len(choice["logprobs"]["token_logprobs"]) == 26
        messages = [{"role": "user", "content": "Write a function."}]
        chat = {"model": "tiny", "messages": messages, "max_tokens": 6, "n": 2, "temperature": 1}
        answer = http.post("/v1/chat/completions", json=chat).json()
        assert [one["finish_reason"] for one in answer["choices"]] == ["length"] * 2


def test_doctor_finds_no_fault_with_one_worker(sole):
    found = list(checks_of(sole.admin_address, sole.address, token=""))
    assert [one for one in found if one.level is Level.FAULT] == []
    (noted,) = (one for one in found if one.subject == "prefill workers")
    assert noted.text.startswith("none is registered: decode workers compute prompts")
