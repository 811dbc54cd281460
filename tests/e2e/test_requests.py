"""Refusals and endings of requests."""

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.client.client import AsyncClient, Client
from baton.client.types import FinishReason
from baton.errors import (
    AlreadyExistsError,
    CancelledError,
    InvalidArgumentError,
    NotFoundError,
)
from baton.rpc.errors import error_of
from baton.sampling import SamplingParams
from baton.v1 import inference_pb2 as pb
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.watch import held, num_steps, until_nothing_is_held
from tests.support.waiting import until_observed

pytestmark = pytest.mark.e2e

MAX_ROUTER_BYTES = 300 * 2**20


async def refusal_of(address: str, request: bytes) -> Exception:
    """Returns the router's error for these bytes as a `GenerateRequest`, as the client's type."""
    options = [("grpc.max_send_message_length", 64 * 2**20)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        generate = channel.unary_stream("/baton.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(request, timeout=10.0):
                pass
    return error_of(caught.value)


def request(**fields: object) -> bytes:
    fields = fields if {"token_ids", "text"} & fields.keys() else {"text": "a", **fields}
    return pb.GenerateRequest(**fields).SerializeToString()


def ids(*token_ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=token_ids)


# One of each kind: the others are those of the intake and of malformed messages, without a process.
REFUSED = {
    "too long": (request(token_ids=ids(*[5] * 2033)), "sampling.max_tokens", "is 2048"),
    "10 MB of text": (request(text="a" * 10 * 2**20), "input.text", "1048576"),
    "not UTF-8": (request(text="good").replace(b"good", b"b\xff\xfed"), "input.text", "UTF-8"),
}


@pytest.fixture(scope="module")
def steps_before(cluster) -> dict[str, int]:
    return num_steps(cluster)


@pytest.mark.parametrize(("message", "field", "bound"), REFUSED.values(), ids=REFUSED)
async def test_router_rejects_a_bad_request_with_field_and_bound(
    cluster, steps_before, message, field, bound
):
    failure = await refusal_of(cluster.address, message)
    assert isinstance(failure, InvalidArgumentError), repr(failure)
    assert failure.field == field
    assert bound in failure.problem


async def test_router_finds_no_unknown_model_and_lists_its_own(cluster, steps_before):
    failure = await refusal_of(cluster.address, request(model="模" * 5000))
    assert isinstance(failure, NotFoundError), repr(failure)
    assert "expected one of 'tiny'" in str(failure)


async def test_rejected_requests_cost_no_compute(cluster, steps_before):
    assert num_steps(cluster) == steps_before
    assert held(cluster) == {}


async def test_router_rejects_an_oversized_message(cluster):
    failure = await refusal_of(cluster.address, request(text="a" * 20 * 2**20))
    assert isinstance(failure, InvalidArgumentError)
    assert "larger than max" in failure.problem


# Endings.


async def ended(client: AsyncClient, prompt: object, **fields: object):
    fields = {"ignore_eos": True, **fields}
    generation = client.generate(prompt, SamplingParams(**fields))
    tokens = await generation.token_ids()
    return tokens, await generation.text(), generation.finished


@pytest.mark.parametrize("at", [0, 1, 6])
async def test_generation_ends_with_its_stop_token_included(client, cluster, at):
    plain, _, _ = await ended(client, prompt_of(20), max_tokens=16)
    last = plain.index(plain[at])
    tokens, _, finished = await ended(
        client, prompt_of(20), max_tokens=16, stop_token_ids=(plain[at],)
    )
    assert (tokens, finished.reason) == (plain[: last + 1], FinishReason.STOP_TOKEN)
    assert finished.stop_reason == finished.stop_token_id == plain[at]
    await until_nothing_is_held(cluster)


def long_generation(client: AsyncClient, name: str = ""):
    wanted = SamplingParams(max_tokens=1500, ignore_eos=True)
    return client.generate(prompt_of(30), wanted, request_id=name)


async def test_abort_of_an_unknown_request_is_not_found(client):
    with pytest.raises(NotFoundError, match="absent"):
        await client.abort("absent")


async def test_request_id_is_unique_in_flight_and_reusable_after(client, cluster):
    async with long_generation(client, "twin") as first:
        await anext(first)
        with pytest.raises(AlreadyExistsError, match="twin"):
            await long_generation(client, "twin").text()
        await anext(first)
        await client.abort("twin")
        with pytest.raises(CancelledError):
            await first.text()
    for _ in range(100):  # a cancelled call says nothing of its worker
        again = client.generate(prompt_of(30), SamplingParams(max_tokens=30), request_id="twin")
        assert (await anext(again)).position == 0
        await client.abort("twin")
        with pytest.raises(CancelledError):
            await again.text()
    await until_nothing_is_held(cluster)


async def test_accepted_and_finished_report_placement_and_timings(client):
    generation = client.generate(prompt_of(25), SamplingParams(max_tokens=3))
    accepted = await generation.wait_accepted()
    await generation.text()
    assert accepted.num_prompt_tokens == 25
    assert accepted.placement.prefill_worker.startswith("prefill")
    assert accepted.placement.decode_worker.startswith("decode")
    timings = generation.finished.timings
    assert 0 < timings.admission <= timings.time_to_first_token <= timings.total
    assert timings.exposed_transfer is not None


# The process as a server.


@pytest.mark.parametrize("name", ["router", "prefill-0", "decode-0"])
async def test_health_service_serves_liveness_and_readiness(cluster, name):
    async with grpc.aio.insecure_channel(cluster.process(name).endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "liveness", "readiness"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=5.0)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def services_of(endpoint: str) -> set[str]:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([asked]), timeout=5.0))
    return {service.name for service in answer.list_services_response.service}


def test_reflection_lists_services_only_where_enabled(cluster):
    inference, admin = services_of(cluster.address), services_of(cluster.admin_address)
    assert {name for name in inference | admin if name.startswith("baton.")} == {
        "baton.v1.Inference",
        "baton.v1.Admin",
    }
    assert "baton.v1.Admin" not in inference
    assert "baton.v1.Inference" not in admin
    with pytest.raises(grpc.RpcError) as caught:
        services_of(cluster.process("decode-0").endpoint)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_router_stays_small_and_maps_no_torch(client, cluster):
    await client.generate([{"role": "user", "content": "hi"}]).text()
    process = psutil.Process(cluster.process("router").pid)
    assert process.memory_info().rss < MAX_ROUTER_BYTES
    assert not any("torch" in mapped.path for mapped in process.memory_maps())


async def test_locality_index_learns_blocks_of_all_workers(client, cluster):
    await client.generate(prompt_of(64, seed=99), SamplingParams(max_tokens=2)).text()

    def is_indexed() -> bool:
        with Client(cluster.admin_address) as admin:
            return all(worker.num_indexed_hashes > 0 for worker in admin.list_workers())

    await until_observed(is_indexed, within=3.0, what="an event of every worker")


async def test_flush_cache_drops_one_prompt_and_keeps_others(client):
    async def num_cached(prompt: list[int]) -> int:
        generation = client.generate(prompt, SamplingParams(max_tokens=2))
        await generation.text()
        return generation.finished.usage.num_cached_prompt_tokens

    beginning = prompt_of(64, seed=97)
    longer, other = beginning + prompt_of(32, seed=96), prompt_of(64, seed=95)
    for prompt in (longer, other):
        assert await num_cached(prompt) == 0
    assert await client.flush_cache(beginning[:48]) == 2 * 3  # of both workers
    assert await client.flush_cache(beginning[:48]) == 0
    assert [await num_cached(p) for p in (other, longer)] == [63, 0]


async def test_flush_cache_makes_a_prompt_uncached(client):
    prompt = prompt_of(64, seed=98)
    for expected in (0, 63):
        generation = client.generate(prompt, SamplingParams(max_tokens=2))
        await generation.text()
        assert generation.finished.usage.num_cached_prompt_tokens == expected
    assert await client.flush_cache() > 0
    generation = client.generate(prompt, SamplingParams(max_tokens=2))
    await generation.text()
    assert generation.finished.usage.num_cached_prompt_tokens == 0
    assert generation.finished.usage.num_reused_decode_blocks == 0
