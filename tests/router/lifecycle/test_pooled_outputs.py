"""Embeddings and scores of the router, with workers that say what a test gives."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from baton.cluster.registry.registry import WorkerRecord
from baton.errors import InternalError, UnavailableError
from baton.models.pooling import Pooling
from baton.v1 import prefill_pb2
from baton_router.routing.admission.quotas import Quota
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.member import Member
from baton_router.routing.fleet.worker_model import PoolModel
from baton_router.routing.placement.decision import DEFAULT_RULES, PlacementInputs
from baton_router.routing.placement.explanation import why
from baton_router.routing.placement.placer import Placer
from baton_router.text.model_card import ModelCard
from tests.support.router.front import front_of
from tests.support.router.scripted import FakeFleet, Forever, Scripts, Vanish, Worker, card

ADMITTED = prefill_pb2.PoolResponse(admitted=prefill_pb2.PrefillAdmitted())
STARTED = prefill_pb2.PoolResponse(started=prefill_pb2.PrefillStarted())


def result(*values: float) -> prefill_pb2.PoolResponse:
    return prefill_pb2.PoolResponse(result=prefill_pb2.PoolResult(values=values))


ANSWER = [ADMITTED, STARTED, result(0.6, 0.8)]


def embedder(kind: str = "embedding", **changes: Any) -> ModelCard:
    pooling = Pooling(**{"kind": kind, "width": 2, "normalizes": True, **changes})
    return replace(card(), pooling=pooling)


def worker(*script: Any, name: str = "p0") -> Worker:
    return Worker(name, "prefill", list(script))


@asynccontextmanager
async def front(
    *workers: Worker, model: ModelCard | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    async with front_of(*workers, model=model or embedder(), **options) as client:
        yield client


async def embed(
    client: httpx.AsyncClient, given: str | Sequence[Any] = "x", **more: Any
) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"input": given, **more})


async def test_embedding_needs_no_decode_worker():
    one = worker(*ANSWER)
    async with front(one) as client:
        response = await embed(client)
    assert response.json()["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    (request,) = one.requests
    assert isinstance(request, prefill_pb2.PoolRequest)
    assert request.HasField("first_token_due")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_embedding_is_computed_elsewhere_when_a_worker_is_lost(role):
    """On decode workers where there is no prefill worker."""
    lost = Worker("w0", role, [ADMITTED, Vanish(0.01)])
    other = Worker("w1", role, list(ANSWER))
    async with front(lost, other) as client:
        response = await embed(client)
    assert response.status_code == 200
    assert (lost.num_losses, len(other.requests)) == (1, 1)


async def test_embedding_is_given_to_the_next_worker_when_refused():
    full, other = worker(UnavailableError("draining")), worker(*ANSWER, name="p1")
    async with front(full, other) as client:
        assert (await embed(client)).status_code == 200
    async with front(full) as client:
        response = await embed(client)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "draining")


async def test_embedding_at_which_workers_die_is_poison():
    workers = [worker(ADMITTED, InternalError("died"), name=f"p{i}") for i in range(3)]
    async with front(*workers) as client:
        response = await embed(client)
    assert response.status_code == 500
    assert sum(len(one.requests) for one in workers) == 2


async def test_embeddings_of_different_lengths_are_a_bug():
    one = worker()
    one.script = Scripts([ANSWER, [ADMITTED, STARTED, result(1.0)]])
    async with front(one) as client:
        assert (await embed(client, ["x", "y"])).status_code == 500


async def test_one_failed_input_ends_the_others():
    one = worker()
    one.script = Scripts([[ADMITTED, Forever()], [UnavailableError("broken")]])
    async with front(one) as client:
        response = await asyncio.wait_for(embed(client, ["x", "y"]), timeout=5.0)
        assert response.status_code == 503
    assert one.num_running == 0


async def test_embedding_that_is_late_fails_by_its_deadline():
    async with front(worker(ADMITTED, Forever())) as client:
        response = await embed(client, baton={"timeout_s": 0.1})
    assert response.status_code == 504


async def test_embeddings_count_towards_limits_of_the_tenant():
    async with front(worker(*ANSWER), limits=Quota(requests_per_minute=2)) as client:
        statuses = [(await embed(client, ["x", "y"])).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    async with front(worker(*ANSWER), limits=Quota(tokens_per_minute=8)) as client:
        responses = [await embed(client, [5] * 6) for _ in range(2)]
    assert [r.status_code for r in responses] == [200, 429]
    assert "tokens" in responses[1].json()["error"]["message"]


async def test_embeddings_queue_for_the_concurrency_of_the_tenant():
    one = worker(*ANSWER)
    async with front(one, limits=Quota(max_concurrent=1)) as client:
        assert (await embed(client, ["x"] * 8)).status_code == 200
    assert len(one.requests) == 8


async def test_score_is_the_sigmoid_without_overflow():
    async with front(worker(ADMITTED, STARTED, result(-200.0)), model=embedder("score")) as client:
        response = await client.post("/v1/score", json={"text_1": "x", "text_2": ["y", "z"]})
    assert [one["score"] for one in response.json()["data"]] == [0.0, 0.0]


async def test_embedding_of_too_long_text_is_refused_as_clients_expect():
    text = "word " * 3000
    num_tokens = len(embedder().encode(text))
    async with front() as client:
        for path, body, field in (
            ("embeddings", {"input": ["a", text]}, "input[1]"),
            ("score", {"text_1": "a", "text_2": text}, "text_2"),
        ):
            answer = await client.post(f"/v1/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert error["code"] == "context_length_exceeded"
            assert f"has {num_tokens} tokens" in error["message"]
            assert "this model's maximum context length is 2048 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("documents", [["y", "z", "x"], [{"text": "y"}, {"text": "z"}, "x"]])
async def test_rerank_sorts_documents_by_score(path, documents):
    one = worker()
    one.script = Scripts([[ADMITTED, STARTED, result(value)] for value in (-1.0, 2.0, 0.0)])
    asked = {"query": "q", "documents": documents, "top_n": 2}
    async with front(one, model=embedder("score"), limits=Quota(max_concurrent=1)) as client:
        answer = (await client.post(path, json=asked)).json()
        bare = await client.post(path, json={**asked, "return_documents": False})
        told = await client.post(path, json={**asked, "return_documents": True})
    assert [found["index"] for found in answer["results"]] == [1, 2]
    scores = [found["relevance_score"] for found in answer["results"]]
    assert scores == pytest.approx([0.8808, 0.5], abs=1e-4)
    texts = [found.get("document") for found in answer["results"]]
    assert texts == ([None] * 2 if path == "/v2/rerank" else [{"text": "z"}, {"text": "x"}])
    assert "document" not in bare.json()["results"][0]
    assert "document" in told.json()["results"][0]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    assert answer["model"] == "tiny"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", {"image": "x"}]}, "documents[1].text"),
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"top_n": 0}, "top_n"),
    ],
)
async def test_rerank_refuses_bad_field_by_name(fields, param):
    asked = {"query": "q", "documents": ["y"], **fields}
    async with front(worker(), model=embedder("score")) as client:
        answer = await client.post("/v1/rerank", json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_models_list_pooled_outputs():
    async with front(worker()) as client:
        (listed,) = (await client.get("/v1/models")).json()["data"]
    assert listed["pooled_output"] == "embedding"


def candidates(*excluded: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(f"p{i}", "prefill", b"", 0, excluded=e) for i, e in enumerate(excluded))


def test_place_chooses_a_prefill_worker_alone():
    inputs = PlacementInputs("r", 9, candidates("", "draining"), prefill_alone=True)
    decision = DEFAULT_RULES.decision(inputs)
    placement = decision.placement
    assert placement is not None
    assert (placement.prefill, placement.decode, len(placement.chosen)) == ("p0", "", 1)
    assert "No other choice could take it" in why(decision)
    two = replace(inputs, candidates=candidates("", ""))
    assert "the request's id breaks the tie" in why(DEFAULT_RULES.decision(two))
    broken = replace(two, broken=frozenset({("p0", "")}))
    placement = DEFAULT_RULES.decide(broken)
    assert placement is not None
    assert placement.prefill == "p1"


def test_why_none_of_prefill_alone_names_no_decode_worker():
    def reason(*given: str) -> str:
        inputs = PlacementInputs("r", 9, candidates(*given), prefill_alone=True)
        return DEFAULT_RULES.decision(inputs).why_none

    assert reason() == "no prefill worker is known"
    assert reason("draining") == "no prefill worker can take work: draining"
    placer = Placer(FakeFleet([worker()]), prefill_alone=True)  # type: ignore[arg-type]
    assert placer.why_none() == ""
    assert Placer(FakeFleet([worker()])).why_none() == "no decode worker is known"  # type: ignore[arg-type]


def test_fleet_excludes_workers_whose_model_makes_another_output():
    record = WorkerRecord(
        "w", "prefill", "h:1", "h:1", 1, "m", b"f" * 16, b"", b"t" * 16, "float32", 16, 256, 9,
        pooled_output="score",
    )  # fmt: skip
    assert WorkerRecord.from_fields(_fields(record)) == record
    member = Member(record, PoolModel())
    member.is_serving = True
    assert member.excluded(b"t" * 16, "score") == ""
    assert member.excluded(b"t" * 16, "embedding") == "its model makes score"
    assert member.excluded(b"t" * 16) == "its model makes score"


def _fields(record: WorkerRecord) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in record.to_fields().items()
    }


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("embeddings", {"input": ["a", "a b" * 100_000]}, "input[1]"),
        ("score", {"text_1": "a b" * 50_000, "text_2": "b a" * 50_000}, "text_2"),
    ],
)
async def test_long_texts_are_refused_by_their_bytes(route, body, field):
    kind = "score" if route == "score" else "embedding"
    async with front(worker(), model=embedder(kind)) as client:
        response = await client.post(f"/v1/{route}", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert "tokens or more by its bytes" in error["message"]
