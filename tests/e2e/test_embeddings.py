"""Embeddings and scores of a real router, whose models are served by prefill workers alone."""

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from typer.testing import CliRunner

from baton import AsyncClient, Client
from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.cli.main import app
from baton.errors import CancelledError, FailedPreconditionError
from baton.models import locate
from tests.support.cluster.checkpoints import VOCAB_SIZE
from tests.support.cluster.scraped import scrape
from tests.support.cluster.worker_beside import worker_beside
from tests.support.engine.pooled import (
    add_tokenizer,
    expected_embeddings,
    expected_logits,
    save_embedding,
    save_scorer,
)
from tests.support.waiting import until_observed, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = ["def add(a, b):", "return a + b", "import os\n" * 20, "x"]
# Prompts of more tokens take several steps.
WORKER_FLAGS: dict[str, Any] = {
    "num_blocks": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "drain_timeout_s": 5.0,
}
MAX_INPUTS, MAX_INPUT_TOKENS = 12, 600


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{locate('tiny')}/tokenizer.json")


def ids_of(texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer().encode(text).ids for text in texts]


def assert_close(found: Sequence[Sequence[float]], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for vector, other in zip(found, expected, strict=True):
        assert np.abs(np.asarray(vector) - np.asarray(other)).max() <= 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of an embedding and of a scoring model."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("embedder", "scorer")}
    save_embedding("qwen3", folders["embedder"], vocab_size=VOCAB_SIZE)
    save_scorer("llama", folders["scorer"], vocab_size=VOCAB_SIZE)
    for folder in folders.values():
        add_tokenizer(folder)
    return folders


@pytest.fixture(scope="module")
def cluster(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    """Two prefill workers of the embedding model and one of the scoring model; no decode worker,
    and none at all of a third model, which generates."""
    embedder, scorer = (f"{name}={folder}" for name, folder in folders.items())
    with LocalCluster(
        model=embedder,
        num_prefill=2,
        num_decode=0,
        router_flags={
            "model": f"{embedder},{scorer},tiny",
            "max_inputs": MAX_INPUTS,
            "max_input_tokens": MAX_INPUT_TOKENS,
        },
        worker_flags=WORKER_FLAGS,
        http_port=0,
    ) as cluster:
        flags = {"redis_url": cluster.redis_url, "model": scorer, **WORKER_FLAGS}
        taken: set[int] = set()
        ports = []
        for _ in range(2):
            ports.append(free_port(taken))
            taken.add(ports[-1])
        worker = Process("scorer", "prefill", ports[0], flags, admin_port=ports[1])
        worker.start(tmp_path_factory.mktemp("logs"))
        try:
            with Client(cluster.address, admin_address=cluster.admin_address) as client:
                wait_until(lambda: client.get_model("scorer").has_workers, within=60.0)
            yield cluster
        finally:
            worker.signal(9)


@pytest_asyncio.fixture
async def openai_client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.http_address}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest_asyncio.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address, admin_address=cluster.admin_address) as client:
        yield client


@pytest.fixture
def http(cluster: LocalCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.http_address, timeout=60.0) as client:
        yield client


@pytest.mark.symptom(
    "gbrain#220, openclaw#59048, tabbyAPI#268",
    there="embeddings in base64, which OpenAI's client asks for by default, are wrong",
    here="Answers in the encoding that was asked for, in the order of the inputs.",
)
@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_embeddings_equal_those_of_transformers(folders, openai_client, encoding):
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = await openai_client.embeddings.create(model="embedder", input=TEXTS, **options)
    found = [one.embedding for one in answer.data]
    if encoding == "base64":
        found = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in found]
    assert_close(found, expected_embeddings(folders["embedder"], ids_of(TEXTS)))
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(map(len, ids_of(TEXTS)))
    assert answer.model == "embedder"


async def test_embedding_of_a_text_is_the_same_beside_others(folders, openai_client):
    """Its tokenizer cut texts, and padded them to the longest of a call, when it was saved."""
    create = partial(openai_client.embeddings.create, model="embedder", encoding_format="float")
    together = await create(input=TEXTS)
    for text, beside in zip(TEXTS, together.data, strict=True):
        alone = await create(input=text)
        assert_close([beside.embedding], [alone.data[0].embedding])
        assert alone.usage.prompt_tokens == len(tokenizer().encode(text).ids)


@pytest.mark.parametrize(
    "small", [{"max_model_len": 32}, {"num_blocks": 2}], ids=["length", "pool"]
)
async def test_embedding_is_placed_on_a_worker_it_fits(folders, cluster, openai_client, small):
    text = "import os\n" * 20
    expected = expected_embeddings(folders["embedder"], ids_of([text, "x"]))
    create = partial(openai_client.embeddings.create, model="embedder", encoding_format="float")
    own = {**WORKER_FLAGS, **small}
    with worker_beside(cluster, "prefill", model=f"embedder={folders['embedder']}", **own):
        for given, vector in zip([text, "x"] * 6, expected * 6, strict=True):
            answer = await create(input=given)
            assert_close([answer.data[0].embedding], [vector])


async def test_embeddings_take_texts_and_token_ids(folders, openai_client):
    ids = ids_of(TEXTS)
    create = partial(openai_client.embeddings.create, model="embedder", encoding_format="float")
    expected = expected_embeddings(folders["embedder"], ids)
    for given, wanted in ((TEXTS[0], expected[:1]), (ids[1], expected[1:2]), (ids, expected)):
        answer = await create(input=given)
        assert_close([one.embedding for one in answer.data], wanted)


async def test_embeddings_of_some_dimensions_have_length_one(folders, openai_client):
    create = partial(openai_client.embeddings.create, model="embedder", input=TEXTS)
    answer = await create(dimensions=10)
    whole = expected_embeddings(folders["embedder"], ids_of(TEXTS))
    expected = [vector[:10] / vector[:10].norm() for vector in whole]
    assert_close([one.embedding for one in answer.data], expected)
    with pytest.raises(openai.BadRequestError, match=r"is 65; must be in \[1, 64\]") as caught:
        await create(dimensions=65)
    assert caught.value.param == "dimensions"


def test_score_equals_the_classification_head(folders, http):
    pairs = [("def add(a, b):", second) for second in TEXTS]
    ids = [tokenizer().encode(*pair).ids for pair in pairs]
    expected = [1 / (1 + math.exp(-logit)) for logit in expected_logits(folders["scorer"], ids)]
    bodies = [
        {"text_1": pairs[0][0], "text_2": TEXTS},
        {"queries": [first for first, _ in pairs], "documents": TEXTS},
    ]
    for body in bodies:
        answer = http.post("/v1/score", json={"model": "scorer", **body}).json()
        assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
        assert_close([[one["score"]] for one in answer["data"]], [[e] for e in expected])
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_score_of_an_embedding_model_is_the_cosine(folders, client):
    vectors = expected_embeddings(folders["embedder"], ids_of(TEXTS))
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[2]), (TEXTS[3], TEXTS[3])]
    found = await client.score(pairs, model="embedder")
    expected = [vectors[0] @ vectors[1], vectors[0] @ vectors[2], 1.0]
    assert_close([[score] for score in found.scores], [[e] for e in expected])
    # A text of several pairs is computed once.
    assert found.num_prompt_tokens == sum(map(len, ids_of(TEXTS)))


async def test_client_embeds_texts_and_token_ids(folders, client):
    ids = ids_of(TEXTS)
    answer = await client.embed([TEXTS[0], ids[1]], model="embedder", dimensions=64)
    assert_close(answer.vectors, expected_embeddings(folders["embedder"], ids[:2]))
    assert (await client.embed(TEXTS[0], model="embedder")).num_prompt_tokens == len(ids[0])
    listed = {model.name: model.pooled_output for model in (await client.list_models()).models}
    assert listed == {"embedder": "embedding", "scorer": "score", "tiny": ""}


TEXT = {"prompt": "x"}, "completions"
CHAT = {"messages": [{"role": "user", "content": "x"}]}, "chat/completions"
EMBEDDINGS = {"input": "x"}, "embeddings"
SCORES = {"text_1": "x", "text_2": "y"}, "score"


def test_doctor_wants_no_decode_worker_for_pooled_outputs(cluster):
    where = ["--admin", cluster.admin_address, "--address", cluster.address]
    result = CliRunner().invoke(app, ["doctor", *where, "--try", "--json"])
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0, findings
    subjects = {finding["subject"] for finding in findings}
    assert "prefill workers" in subjects
    assert "decode workers" not in subjects
    assert "a request" in subjects


@pytest.mark.parametrize(
    ("model", "wanted", "reason"),
    [
        ("tiny", EMBEDDINGS, "model 'tiny' has no pooled output: its checkpoint has neither"),
        ("tiny", SCORES, "model 'tiny' has no pooled output: its checkpoint has neither"),
        ("embedder", TEXT, "model 'embedder' makes embeddings and generates no text"),
        ("embedder", CHAT, "model 'embedder' makes embeddings and generates no text"),
        ("scorer", TEXT, "model 'scorer' makes scores and generates no text"),
        ("scorer", EMBEDDINGS, "model 'scorer' scores pairs of texts and makes no embeddings"),
    ],
)
def test_router_refuses_output_that_a_model_does_not_make(http, model, wanted, reason):
    body, path = wanted
    response = http.post(f"/v1/{path}", json={"model": model, **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_output",
        "model",
    )
    assert error["message"].startswith(reason)


async def test_router_refuses_other_outputs_over_grpc(client):
    with pytest.raises(FailedPreconditionError, match="'tiny' has no pooled output"):
        await client.embed("x", model="tiny")
    with pytest.raises(FailedPreconditionError, match="'embedder' makes embeddings"):
        await client.generate("x", model="embedder").text()


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("embeddings", {"input": []}, "input", "has 0 items"),
        ("embeddings", {"input": ["x"] * (MAX_INPUTS + 1)}, "input", "at most 12"),
        ("embeddings", {"input": ["x", ""]}, "input[1]", "is empty"),
        ("embeddings", {"input": ["x", 5]}, "input[1]", "str"),
        ("embeddings", {"input": [[5], [10**6]]}, "input[1][0]", "must be in [0, 3072)"),
        ("embeddings", {"input": [[]]}, "input[0]", "at least 1"),
        (
            "embeddings",
            {"input": [5] * 256},
            "input[0]",
            "this model's maximum context length is 256",
        ),
        ("embeddings", {"input": [[5] * 86] * 7}, "input", "have 602 tokens together"),
        ("score", {"text_1": "x"}, "text_2", "is missing"),
        ("score", {"text_1": ["x", "y"], "text_2": ["z"] * 3}, "text_1", "expected 1 or as many"),
        ("score", {"queries": "x", "documents": ["y", ""]}, "documents", "is empty"),
        ("score", {"queries": "x", "text_2": "y"}, "documents", "is missing"),
    ],
)
def test_router_refuses_inputs_by_name_of_field(http, path, body, param, problem):
    model = "embedder" if path == "embeddings" else "scorer"
    response = http.post(f"/v1/{path}", json={"model": model, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert problem in error["message"]


async def test_embedding_ends_at_its_deadline_and_is_freed(cluster, client, http):
    await client.pause_admission()
    try:
        body = {"model": "embedder", "input": TEXTS, "baton": {"timeout_s": 0.3}}
        response = await asyncio.to_thread(http.post, "/v1/embeddings", json=body)
        assert response.status_code == 504
        assert await client.list_requests() == []
    finally:
        await client.resume_admission()


async def test_abort_ends_the_whole_call(cluster, client):
    await client.pause_admission()
    try:
        asked = asyncio.create_task(client.embed(TEXTS, model="embedder", request_id="one"))
        await until_observed(lambda: len(_in_flight(cluster)) == len(TEXTS), within=5.0)
        assert _in_flight(cluster) == {"one-0", "one-1", "one-2", "one-3"}
        await client.abort("one-2")
        with pytest.raises(CancelledError, match="one-2 was aborted"):
            await asked
        assert _in_flight(cluster) == set()
    finally:
        await client.resume_admission()


async def test_disconnecting_client_ends_its_requests(cluster, client):
    await client.pause_admission()
    try:
        async with httpx.AsyncClient(base_url=cluster.http_address) as http:
            body = {"model": "embedder", "input": TEXTS}
            asked = asyncio.create_task(http.post("/v1/embeddings", json=body))
            await until_observed(lambda: len(_in_flight(cluster)) == len(TEXTS), within=5.0)
            asked.cancel()
        await until_observed(lambda: not _in_flight(cluster), within=5.0)
    finally:
        await client.resume_admission()


def _in_flight(cluster: LocalCluster) -> set[str]:
    with Client(cluster.address, admin_address=cluster.admin_address) as client:
        return {one.request_id for one in client.list_requests()}


async def test_embeddings_survive_the_loss_of_a_worker(cluster, folders, client):
    expected = expected_embeddings(folders["embedder"], ids_of(TEXTS))
    asked = [
        asyncio.create_task(client.embed(TEXTS, model="embedder", request_id=f"r{i}"))
        for i in range(12)
    ]
    await asyncio.sleep(0.05)
    cluster.kill("prefill-0")
    for answer in await asyncio.gather(*asked):
        assert_close(answer.vectors, expected)
    await asyncio.to_thread(cluster.restart, "prefill-0")


async def test_embeddings_are_counted_and_leave_nothing(cluster, client):
    def scraped(name: str, sample: str = "", **labels: str) -> float:
        family = scrape(cluster.metrics_endpoints["router"]).get(name)
        return family.total(sample or name, **labels) if family else 0.0

    duration = "gen_ai_server_request_duration_seconds"
    embeddings = partial(scraped, duration, f"{duration}_count", gen_ai_operation_name="embeddings")
    tokens = partial(scraped, "baton_prompt_tokens_total")
    placed = partial(scraped, "baton_placements_total", path="prefill_alone")
    before = embeddings(), tokens(), placed()
    answer = await client.embed(TEXTS, model="embedder")
    expected = (
        before[0] + len(TEXTS),
        before[1] + answer.num_prompt_tokens,
        before[2] + len(TEXTS),
    )
    # What was told a moment ago is told again.
    await until_observed(lambda: (embeddings(), tokens(), placed()) == expected, within=5.0)
    assert scraped("baton_requests_in_flight") == 0
    for worker in ("prefill-0", "prefill-1"):
        held = scrape(cluster.metrics_endpoints[worker])["baton_kv_blocks"]
        assert held.total("baton_kv_blocks", state="held") == 0
