"""Connectors between real workers: the same answers by each."""

import grpc
import pytest

from baton.cluster.prefix import hash_chain
from baton.errors import InvalidArgumentError
from baton.rpc.errors import error_of
from baton.sampling import SamplingParams
from baton.v1 import admin_pb2
from baton.v1.kv_transfer_pb2 import DescribeRequest
from baton.v1.kv_transfer_pb2_grpc import KvTransferStub
from tests.support.repository import ROOT
from tests.support.worker.pair import TIMEOUT, Answer, pair_of, rest_of
from tests.support.worker.reference import alone, prompt_of

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
LENGTHS = (1, 16, 75, 160)
ONE_HOST = "both are on one host and of one user"
IN_HOST_MEMORY = "not by cuda-ipc: the pools of this worker are in host memory"
NOT_SHARED = "not by shm: its pools are not in shared memory"
WAYS = {
    "grpc": ({"kv_connector": "grpc"}, "grpc", "no other is allowed here"),
    "shm": ({"kv_connector": "shm"}, "shm", ONE_HOST),
    "auto": ({}, "shm", f"{ONE_HOST}; {IN_HOST_MEMORY}"),
    "nixl": ({"kv_connector": "nixl"}, "nixl", "both have nixl"),
    "auto, not shared": (
        {"shared_pools": False},
        "nixl",
        f"both have nixl; {IN_HOST_MEMORY}; {NOT_SHARED}",
    ),
}


@pytest.mark.parametrize(
    ("settings", "connector", "reason"),
    [
        pytest.param(*way, id=name, marks=pytest.mark.slow if way[1] == "nixl" else ())
        for name, way in WAYS.items()
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_transports_give_same_tokens_and_are_reported(
    checkpoint, family, settings, connector, reason
):
    model, prompts = checkpoint(family), [prompt_of(n) for n in LENGTHS]
    expected = alone(model, prompts, GREEDY)
    async with pair_of(model, max_num_batched_tokens=24, **settings) as pair:
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await pair.hand_over(prompt, GREEDY)
            assert [o.token_ids for o in answer.outputs] == tokens
            ready = answer.kv_ready
            assert (ready.connector, ready.connector_reason) == (connector, reason)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of example plug-ins is found by its metadata, as an installed one is."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/support/plugins"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_connector_of_a_package_gives_same_tokens(examples, checkpoint, family):
    model, prompts = checkpoint(family), [prompt_of(n) for n in LENGTHS]
    expected = alone(model, prompts, GREEDY)
    async with pair_of(model, max_num_batched_tokens=24, kv_connector="proc-mem") as pair:
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await pair.hand_over(prompt, GREEDY)
            assert [o.token_ids for o in answer.outputs] == tokens
            ready = answer.kv_ready
            assert (ready.connector, ready.connector_reason) == ("proc-mem", "both were given it")


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ("auto", "proc-mem", "the other worker was given no connector of a package"),
        ("sealed", "sealed", "its memory is sealed"),
        ("sealed", "proc-mem", "its memory is sealed"),
    ],
)
async def test_connector_of_a_package_is_needed_on_both_sides(
    examples, checkpoint, prefill, decode, reason
):
    sides = {"prefill": {"kv_connector": prefill}, "decode": {"kv_connector": decode}}
    async with pair_of(checkpoint("llama"), **sides) as pair:
        request = pair.decode_request(prompt_of(31), GREEDY, bytes(16))
        with pytest.raises(grpc.aio.AioRpcError, match=f"come by {decode}, and cannot: {reason}"):
            await rest_of(pair.to_decode.Generate(request, timeout=TIMEOUT))


async def test_kv_transfer_has_own_port_when_set(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(75)
    settings = {"kv_port": 0, "kv_connector": "grpc"}
    async with pair_of(model, **settings) as pair:
        assert pair.prefill.server.kv.port != pair.prefill.server.main.port
        answer = await pair.hand_over(prompt, GREEDY)
        assert [o.token_ids for o in answer.outputs] == alone(model, [prompt], GREEDY)[0]
        async with grpc.aio.insecure_channel(pair.prefill.server.main.endpoint) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await KvTransferStub(channel).Describe(DescribeRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_kv_port_takes_larger_messages_than_others(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(75)
    settings = {"kv_port": 0, "kv_connector": "grpc", "max_message_bytes": 4096}
    async with pair_of(model, **settings, kv_max_message_bytes=2**20) as pair:
        answer = await pair.hand_over(prompt, GREEDY)
        assert [o.token_ids for o in answer.outputs] == alone(model, [prompt], GREEDY)[0]
    async with pair_of(model, **settings, kv_max_message_bytes=4096) as pair:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.hand_over(prompt, GREEDY)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_worker_load_reports_swaps_and_drafts(checkpoint):
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    async with pair_of(checkpoint("llama"), decode={"max_drafts": 4}) as pair:
        await pair.hand_over(prompt_of(8) * 4, params)
        load = await pair.decode_admin.GetLoad(admin_pb2.GetLoadRequest())
        stats = pair.decode.model.engine.reading.stats
        assert load.num_drafted_tokens == stats.num_drafted_tokens > 0
        assert load.num_accepted_tokens == stats.num_accepted_tokens
        assert (load.num_swaps, load.num_swapped) == (stats.num_swaps, 0)


async def test_decode_worker_uses_block_hashes_of_handle(checkpoint):
    model, prompt = checkpoint("llama"), prompt_of(75)
    async with pair_of(model) as pair:
        info = pair.decode.model.engine.facts.info
        hashes = hash_chain(info.namespace.root(b"", b""), prompt, 16)
        assert len(hashes) == 4
        for is_given, num_reused in ((True, 0), (False, 4), (True, 4)):
            to_prefill = pair.prefill_request(prompt, GREEDY)
            request = pair.decode_request(prompt, GREEDY, to_prefill.lease_id)
            request.handle.block_hashes = b"".join(hashes) if is_given else b""
            decoding = pair.to_decode.Generate(request, timeout=TIMEOUT)
            prefilling = pair.to_prefill.Prefill(to_prefill, timeout=TIMEOUT)
            answer = Answer(await rest_of(prefilling), await rest_of(decoding))
            assert answer.kv_ready.num_reused_blocks == num_reused
            assert [o.token_ids for o in answer.outputs] == alone(model, [prompt], GREEDY)[0]


async def test_decode_worker_refuses_more_hashes_than_full_blocks(checkpoint):
    async with pair_of(checkpoint("llama")) as pair:
        request = pair.decode_request(prompt_of(31), GREEDY, bytes(16))
        request.handle.block_hashes = bytes(32)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.to_decode.Generate(request, timeout=TIMEOUT).read()
        failure = error_of(caught.value)
        assert isinstance(failure, InvalidArgumentError)
        assert failure.field == "handle.block_hashes"
        assert "at most one for each full block, 1" in str(failure)


async def test_lease_is_found_only_under_its_tenant(checkpoint):
    async with pair_of(checkpoint("llama"), prefill={"lease_timeout_s": 0.3}) as pair:
        for tenant, is_found in (("acme", True), ("globex", False), ("", False)):
            to_prefill = pair.prefill_request(prompt_of(20), GREEDY, tenant="acme")
            request = pair.decode_request(prompt_of(20), GREEDY, to_prefill.lease_id)
            request.handle.tenant = tenant
            decoding = pair.to_decode.Generate(request, timeout=2.0)
            prefilling = pair.to_prefill.Prefill(to_prefill, timeout=TIMEOUT)
            if is_found:
                await rest_of(prefilling)
                assert (await rest_of(decoding))[-1].HasField("finished")
                continue
            with pytest.raises(grpc.aio.AioRpcError):  # no decode worker comes for it
                await rest_of(prefilling)
            decoding.cancel()
