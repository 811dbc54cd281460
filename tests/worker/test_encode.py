"""Encoder outputs that one worker computes for another, or shares with it."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from baton.engine import Engine, EngineConfig
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from baton.models.images.encoder_input import EncoderInput
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.rpc.errors import error_of
from baton.sampling import SamplingParams
from baton.serving.grpc.channels import channel_options
from baton.serving.telemetry import stages
from baton.v1 import admin_pb2, encode_pb2, inference_pb2
from baton.v1.encode_pb2_grpc import EncodeStub
from baton.v1.kv_transfer_pb2_grpc import EncoderTransferStub
from baton.worker.metrics import WorkerMetrics
from baton_kvtransfer.exchange.encoder_fetch import EncoderFetch
from baton_kvtransfer.exchange.exchange import EncoderExchange
from baton_kvtransfer.lease.table import LeaseTable
from baton_kvtransfer.transfer_messages import handle_of_source
from tests.support.engine.images import IMAGE_TOKEN, greedy, image, save_vision_language, words
from tests.support.failures import failure_of
from tests.support.kvtransfer.loopback import payload_request
from tests.support.proxy import Link, Proxy, corrupted, ended, once, truncated
from tests.support.repository import ROOT
from tests.support.spans import kept_spans
from tests.support.waiting import until
from tests.support.worker.crew import Member, crew_of, new_lease_id, tokens_of
from tests.support.worker.pair import TIMEOUT, rest_of

NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
TEXT = f"{words(20, 1)} {IMAGE_TOKEN} {words(5, 2)} {IMAGE_TOKEN} {words(9, 3)}"
IMAGES = (image(1), image(2))


class Prompt:
    """Prompt with two images, on the checkpoint in `path`."""

    def __init__(self, path: str) -> None:
        config = EngineConfig(device="cpu", dtype="float32", num_blocks=96, max_num_seqs=8)
        prompt = Engine.from_pretrained(path, config).prompt_with_images(TEXT, IMAGES)
        self.path = path
        self.tokens = list(prompt.token_ids)
        self.inputs = prompt.encoder_inputs
        self.fields = {"encoder_inputs": list(map(encoder_input_to_message, self.inputs))}
        self.expected = list(greedy(path, TEXT, IMAGES, NUM_TOKENS))

    @property
    def num_tokens_of_images(self) -> int:
        return sum(each.length for each in self.inputs)

    async def check(self, member: Member, sources: Sequence[Any] = (), **fields: Any) -> None:
        """Computes the prompt on `member`, and compares the first token."""
        given = {**self.fields, "encoder_sources": sources, **fields}
        result = await member.first_token(self.tokens, **given)
        assert result.first_tokens[0].token_id == self.expected[0]


@pytest.fixture(scope="module")
def prompt_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Prompt] = {}

    def prompt(family: str) -> Prompt:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            save_vision_language(family, folder)
            made[family] = Prompt(str(folder))
        return made[family]

    return prompt


@pytest.fixture
def prompt(prompt_of: Any) -> Prompt:
    return prompt_of("llava_clip")


@asynccontextmanager
async def encoding(
    source: Member, claimant: Member, inputs: Sequence[EncoderInput], **fields: Any
) -> AsyncIterator[tuple[list[Any], list[Any]]]:
    """Calls that encode images for another worker, and the sources for its request."""
    async with AsyncExitStack() as stack:
        calls, sources = [], []
        for index, each in enumerate(inputs):
            call, lease_id = source.to_encode(each, claimant.id, **fields)
            stack.callback(call.cancel)
            calls.append(call)
            sources.append(source.encoder_source(lease_id, index))
        yield calls, sources


async def encoded(call: Any) -> encode_pb2.Encoded:
    """The event that an output can be fetched."""
    assert (await call.read()).HasField("admitted")
    event = await call.read()
    assert event.HasField("encoded")
    return event.encoded


def leases_of(member: Member) -> LeaseTable:
    return member.worker.component(EncoderExchange).leases


def failures_of(member: Member) -> dict[str, int]:
    """Failed fetches of encoder outputs by reason."""
    return dict(member.worker.component(EncoderExchange).transfers.num_failures)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of example plug-ins is found by its metadata, as an installed one is."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/support/plugins"))


# A connector moves blocks, whichever family's they are.
CONNECTORS = {"grpc": "qwen3_vl", "shm": "qwen2_5_vl", "proc-mem": "llava_clip"}


@pytest.mark.parametrize(
    ("family", "connector"),
    [
        *((family, connector) for connector, family in CONNECTORS.items()),
        pytest.param("llava_clip", "nixl", marks=pytest.mark.slow),
        *(
            pytest.param(family, connector, marks=pytest.mark.nightly)
            for family in CONNECTORS.values()
            for connector in (*CONNECTORS, "nixl")
            if CONNECTORS.get(connector, "llava_clip") != family
        ),
    ],
)
async def test_encode_worker_encodes_images_of_handed_over_prompt(
    examples, prompt_of, family, connector
):
    prompt = prompt_of(family)
    settings = {"kv_connector": connector, "max_num_batched_tokens": 32}
    async with crew_of(prompt.path, "encode", "prefill", "decode", **settings) as crew:
        encode, prefill, decode = crew.members
        async with encoding(encode, prefill, prompt.inputs) as (calls, sources):
            wanted = prefill.prefill_request(
                prompt.tokens, decode_worker=decode.id, encoder_sources=sources, **prompt.fields
            )
            handle = prefill.handle(wanted.lease_id, len(prompt.tokens))
            decoding, _ = decode.to_decode(prompt.tokens, GREEDY, handle=handle, **prompt.fields)
            prefilling = prefill.prefill.Prefill(wanted, timeout=TIMEOUT)
            answer, _, *events = await asyncio.gather(*map(rest_of, (decoding, prefilling, *calls)))
        assert tokens_of(answer) == prompt.expected
        for of_one in events:
            assert [event.WhichOneof("event") for event in of_one] == [
                "admitted",
                "encoded",
                "released",
            ]
            assert not of_one[1].encoded.was_cached
            assert of_one[1].encoded.elapsed.ToNanoseconds() > 0
            assert of_one[1].encoded.work_done.num_encoder_tokens > 0
        assert encode.num_encoded_tokens == prompt.num_tokens_of_images
        assert prefill.num_encoded_tokens == decode.num_encoded_tokens == 0
        assert prefill.num_fetched_outputs == 2
        reported = prefill.worker.component(EncoderExchange).transfers.num_blocks
        assert [name for name, num_blocks in reported.items() if num_blocks] == [connector]
        await crew.nothing_held()
        stats = encode.model.engine.reading.stats
        shown = {
            (sample.name, sample.labels.get("state")): sample.value
            for metric in WorkerMetrics(encode.model, encode.membership).collect()
            for sample in metric.samples
        }
        num_cached = stats.num_cached_encoder_blocks
        assert shown["baton_encoded_tokens_total", None] == prompt.num_tokens_of_images
        assert shown["baton_waiting_encoder_tokens", None] == 0
        assert shown["baton_encoder_blocks", "held"] == 0
        assert shown["baton_encoder_blocks", "cached"] == num_cached > 0
        assert shown["baton_encoder_blocks", "free"] == stats.num_encoder_blocks - num_cached


async def test_decode_worker_alone_fetches_encoder_outputs(prompt):
    async with crew_of(prompt.path, "encode", "decode") as crew:
        encode, decode = crew.members
        async with encoding(encode, decode, prompt.inputs, tenant="acme") as (_, sources):
            fields = {"encoder_sources": sources, "tenant": "acme", **prompt.fields}
            call, _ = decode.to_decode(prompt.tokens, GREEDY, **fields)
            assert tokens_of(await rest_of(call)) == prompt.expected
        assert (decode.num_encoded_tokens, decode.num_fetched_outputs) == (0, 2)


async def test_encode_worker_computes_equal_images_once(prompt):
    async with crew_of(prompt.path, "encode", "prefill", "prefill") as crew:
        encode, *prefills = crew.members
        for prefill, was_cached in zip(prefills, (False, True), strict=True):
            async with encoding(encode, prefill, prompt.inputs) as (calls, sources):
                for call in calls:
                    event = await encoded(call)
                    assert event.was_cached == was_cached
                    assert bool(event.elapsed.ToNanoseconds()) != was_cached
                await prompt.check(prefill, sources)
                assert all([(await call.read()).HasField("released") for call in calls])
            assert prefill.num_encoded_tokens == 0
            assert encode.num_encoded_tokens == prompt.num_tokens_of_images


@pytest.mark.parametrize(
    ("policy", "usual", "urgent"),
    [
        ("priority", {"priority": 1}, {"priority": -1}),
        ("deadline", {"first_token_due": Duration(seconds=9)}, {"first_token_due": Duration()}),
    ],
)
async def test_encode_worker_encodes_in_the_order_of_its_policy(prompt, policy, usual, urgent):
    async with crew_of(prompt.path, "encode", policy=policy, **room_for_one(prompt)) as crew:
        (encode,) = crew.members
        first, second = prompt.inputs
        third = replace(first, content_hash=bytes(16))
        held, _ = encode.to_encode(first, "other")
        await encoded(held)
        waiting, _ = encode.to_encode(second, "other", **usual)
        await until(lambda: waiting_of(encode) == 1)
        last, _ = encode.to_encode(third, "other", **urgent)
        await until(lambda: waiting_of(encode) == 2)
        held.cancel()
        for call in last, waiting:  # each has the only room until it is cancelled
            await encoded(call)
            call.cancel()
        assert encode.num_encoded_tokens == 2 * first.length + second.length


async def test_encode_call_ends_at_its_deadline_in_the_queue(prompt):
    async with crew_of(prompt.path, "encode", **room_for_one(prompt)) as crew:
        (encode,) = crew.members
        first, second = prompt.inputs
        held, _ = encode.to_encode(first, "other")
        await encoded(held)
        late = encode_pb2.EncodeRequest(
            lease_id=new_lease_id(),
            encoder_input=encoder_input_to_message(second),
            claimant="other",
        )
        failure = await failure_of(encode.encode.Encode(late, timeout=0.5))
        assert isinstance(failure, DeadlineExceededError)
        await until(lambda: encode.model.engine.reading.stats.num_encode_jobs == 1)
        held.cancel()
        await crew.nothing_held()
        assert encode.num_encoded_tokens == first.length


def room_for_one(prompt: Prompt) -> dict[str, Any]:
    """Settings of a worker that holds one output at a time."""
    length = max(each.length for each in prompt.inputs)
    return {"encoder_cache_tokens": length, "encoder_budget": length}


def waiting_of(member: Member) -> int:
    return member.model.engine.reading.stats.num_waiting_encode_jobs


async def test_prefill_worker_fetches_only_outputs_that_it_lacks(prompt):
    async with crew_of(prompt.path, "encode", "prefill", prefix_caching=False) as crew:
        encode, prefill = crew.members
        async with encoding(encode, prefill, prompt.inputs[:1]) as (_, sources):
            await prompt.check(prefill, sources)
        assert prefill.num_encoded_tokens == prompt.inputs[1].length
        async with encoding(encode, prefill, prompt.inputs) as (_, sources):
            await prompt.check(prefill, sources)
        assert prefill.num_encoded_tokens == prompt.inputs[1].length
        assert prefill.num_fetched_outputs == 1


async def test_prefill_worker_shares_cached_outputs_and_computes_none(prompt):
    async with crew_of(prompt.path, "prefill", "prefill") as crew:
        holder, other = crew.members
        call, _ = holder.to_encode(prompt.inputs[0], other.id, only_cached=True)
        assert isinstance(await failure_of(call), NotFoundError)
        await prompt.check(holder)
        before = holder.num_encoded_tokens
        async with encoding(holder, other, prompt.inputs, only_cached=True) as (calls, sources):
            assert [(await encoded(call)).was_cached for call in calls] == [True, True]
            await prompt.check(other, sources)
        assert holder.num_encoded_tokens == before
        assert (other.num_encoded_tokens, other.num_fetched_outputs) == (0, 2)


async def test_text_before_image_is_computed_while_image_is_encoded(prompt):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        leases_of(encode).open_timeout = TIMEOUT
        sources = [encode.encoder_source(new_lease_id())]  # its lease comes later
        computing = asyncio.create_task(prompt.check(prefill, sources))
        await until(lambda: prefill.num_computed_tokens == prompt.inputs[0].start)
        request = encode_pb2.EncodeRequest(
            lease_id=sources[0].lease_id,
            encoder_input=encoder_input_to_message(prompt.inputs[0]),
            claimant=prefill.id,
        )
        assert not computing.done()
        events = await rest_of(encode.encode.Encode(request, timeout=TIMEOUT))
        assert events[-1].HasField("released")
        await computing
        assert prefill.num_fetched_outputs == 1
        assert prefill.num_encoded_tokens == prompt.inputs[1].length


async def check_encodes_itself(prompt: Prompt, member: Member, sources: Sequence[Any]) -> None:
    """The prompt is answered although no output comes from `sources`."""
    before = member.num_encoded_tokens
    await prompt.check(member, sources)
    assert member.num_encoded_tokens - before == prompt.num_tokens_of_images
    assert member.num_fetched_outputs == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_id": b"short"},
        {"input": 2},
        {"input": 2**31},
        {"epoch": 1},
        {"endpoint": "127.0.0.1:1"},
        {"lease_id": bytes(16)},
    ],
    ids=str,
)
async def test_prefill_worker_encodes_when_source_is_invalid(prompt, changes):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        leases_of(encode).open_timeout = 0.1
        async with encoding(encode, prefill, prompt.inputs[:1]) as (calls, _):
            await encoded(calls[0])
            source = encode.encoder_source(**{"lease_id": new_lease_id(), **changes})
            await check_encodes_itself(prompt, prefill, [source])


async def test_encoder_lease_serves_one_worker_and_tenant(prompt):
    async with crew_of(prompt.path, "encode", "prefill", "prefill") as crew:
        encode, prefill, other = crew.members
        leases_of(encode).open_timeout = 0.1
        async with encoding(encode, other, prompt.inputs) as (_, sources):
            await check_encodes_itself(prompt, prefill, sources)
        async with encoding(encode, other, prompt.inputs, tenant="acme") as (_, sources):
            await check_encodes_itself(prompt, other, sources)
        assert failures_of(prefill) == failures_of(other) == {"not_opened": 2}


async def test_prefill_worker_encodes_when_router_is_cut_off_source(prompt):
    """The call that would open the lease does not arrive; the prefill worker's fetch does."""
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        prefill.worker.component(EncoderFetch).timeout = 2 * TIMEOUT
        request, link = request_for(prompt, prefill), Link()
        async with (
            Proxy.on(link, encode.worker.server.main.port) as proxy,
            grpc.aio.insecure_channel(
                f"127.0.0.1:{proxy.port}", options=channel_options()
            ) as channel,
        ):
            await channel.channel_ready()
            link.there.is_cut = True
            stub: Any = EncodeStub(channel)
            calling = asyncio.create_task(failure_of(stub.Encode(request, timeout=TIMEOUT)))
            source = encode.encoder_source(request.lease_id)
            await check_encodes_itself(prompt, prefill, [source])
            assert isinstance(await calling, UnavailableError)
        assert failures_of(prefill) == {"not_opened": 1}
        assert encode.num_encoded_tokens == 0


@pytest.mark.parametrize("ending", ["cancelled", "expired"])
async def test_prefill_worker_encodes_when_lease_is_over(prompt, ending):
    limit = {"lease_timeout_s": 0.2} if ending == "expired" else {}
    async with crew_of(prompt.path, "encode", "prefill", **limit) as crew:
        encode, prefill = crew.members
        async with encoding(encode, prefill, prompt.inputs) as (calls, sources):
            for call in calls:
                await encoded(call)
            if ending == "cancelled":
                for call in calls:
                    call.cancel()
            else:
                failures = await asyncio.gather(*map(failure_of, calls))
                assert all(isinstance(failure, NotFoundError) for failure in failures)
            await until(lambda: not encode.num_leased_or_promised)
            await check_encodes_itself(prompt, prefill, sources)
            assert failures_of(prefill) == {"lease_over": 2}


@pytest.mark.parametrize("num_events", [0, 1])
async def test_encode_call_cancelled_before_output_holds_nothing(prompt, num_events):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        for _ in range(4):
            call, _ = encode.to_encode(prompt.inputs[0], prefill.id)
            for _ in range(num_events):
                assert (await call.read()).HasField("admitted")
            call.cancel()
            await crew.nothing_held()
            await encode.admin.FlushCache(admin_pb2.FlushCacheRequest())
        await check_encodes_itself(prompt, prefill, ())


async def test_prompts_with_equal_images_fetch_them_once(prompt):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        async with (
            encoding(encode, prefill, prompt.inputs) as (_, sources),
            encoding(encode, prefill, prompt.inputs) as (_, others),
        ):
            await asyncio.gather(*(prompt.check(prefill, each) for each in (sources, others)))
        assert (prefill.num_encoded_tokens, prefill.num_fetched_outputs) == (0, 2)


@pytest.mark.parametrize("is_early", [True, False])
async def test_refused_encode_call_ends_wait_for_its_lease(prompt, is_early):
    async with crew_of(prompt.path, "prefill", "prefill") as crew:
        source, prefill = crew.members  # the role of the first has changed
        leases_of(source).open_timeout = 2 * TIMEOUT
        prefill.worker.component(EncoderFetch).timeout = 2 * TIMEOUT
        request = request_for(prompt, prefill)
        sources = [source.encoder_source(request.lease_id)]
        if is_early:
            await check_refused(source, request, UnavailableError, "in the prefill role")
            await check_encodes_itself(prompt, prefill, sources)
        else:
            computing = asyncio.create_task(check_encodes_itself(prompt, prefill, sources))
            await until(lambda: prefill.num_computed_tokens == prompt.inputs[0].start)
            await check_refused(source, request, UnavailableError, "in the prefill role")
            await computing


async def test_cancelled_prefill_call_ends_its_fetches(prompt):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        leases_of(encode).open_timeout = TIMEOUT
        sources = [encode.encoder_source(new_lease_id(), index) for index in (0, 1)]
        computing = asyncio.create_task(prompt.check(prefill, sources))
        await until(lambda: encode.worker.server.num_calls == 2)  # which wait for the leases
        computing.cancel()
        await asyncio.gather(computing, return_exceptions=True)
        await crew.nothing_held()
        await until(lambda: failures_of(prefill) == {"cancelled": 2})
        await check_encodes_itself(prompt, prefill, ())


@pytest.mark.parametrize("damage", [corrupted, truncated, ended], ids=lambda d: d.__name__)
async def test_prefill_worker_encodes_when_payload_is_damaged(prompt, damage):
    """The connection carries nothing else by then."""
    async with crew_of(prompt.path, "encode", "prefill", kv_connector="grpc") as crew:
        encode, prefill = crew.members
        link = Link()
        async with Proxy.on(link, encode.worker.server.kv.port) as proxy:
            there = f"127.0.0.1:{proxy.port}"
            async with encoding(encode, prefill, prompt.inputs[:1]) as (calls, (source,)):
                source.endpoint = there
                computing = asyncio.create_task(prompt.check(prefill, [source]))
                await encoded(calls[0])
                await computing
            assert prefill.num_fetched_outputs == 1
            await prefill.admin.FlushCache(admin_pb2.FlushCacheRequest())
            async with encoding(encode, prefill, prompt.inputs) as (calls, sources):
                for call, source in zip(calls, sources, strict=True):
                    source.endpoint = there
                    await encoded(call)
                link.back.damage = once(damage)
                await prompt.check(prefill, sources)
            assert link.back.num_damaged == 1
            assert failures_of(prefill).keys() <= {"damaged", "source_lost", "other"}
            assert failures_of(prefill)


async def test_encoder_transfer_refuses_worker_of_other_pairing(prompt):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        own = prefill.worker.component(EncoderExchange).pairing
        async with encoding(encode, prefill, prompt.inputs[:1]) as (calls, (source,)):
            await encoded(calls[0])
            stub: Any = EncoderTransferStub(prefill.worker.channels.get(source.endpoint))
            fields = ("version", "fingerprint", "layouts")
            others = ("0", b"another", prefill.model.engine.facts.layouts)
            for name, other in zip(fields, others, strict=True):
                handle = handle_of_source(
                    source, replace(own, **{name: other}), prompt.inputs[0].length, ""
                )
                request = payload_request(handle, prefill.id, handle.pairing)
                failure = await failure_of(stub.Fetch(request, timeout=TIMEOUT))
                assert isinstance(failure, FailedPreconditionError)
            await prompt.check(prefill, [source])
        assert prefill.num_fetched_outputs == 1
        assert prefill.num_encoded_tokens == prompt.inputs[1].length


async def test_worker_changes_into_encode_role_and_back(prompt):
    async with crew_of(prompt.path, "prefill", "prefill") as crew:
        changing, prefill = crew.members
        call, _ = changing.to_encode(prompt.inputs[0], prefill.id)
        failure = await failure_of(call)
        assert isinstance(failure, UnavailableError)
        assert "in the prefill role now" in str(failure)
        await changing.set_role(inference_pb2.WORKER_ROLE_ENCODE)
        async with encoding(changing, prefill, prompt.inputs) as (calls, sources):
            for call in calls:
                await encoded(call)
            back = asyncio.create_task(changing.set_role(inference_pb2.WORKER_ROLE_PREFILL))
            await until(lambda: changing.membership.is_draining)
            assert not back.done()  # the leases end before the role does
            await prompt.check(prefill, sources)
        await back
        assert prefill.num_fetched_outputs == 2
        refused = changing.prefill_request(prompt.tokens, **prompt.fields)
        assert (await rest_of(changing.prefill.Prefill(refused, timeout=TIMEOUT)))[-1]


async def test_encode_call_and_transfer_are_spans_of_one_trace(prompt, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")  # so that servers take calls' traces
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        with kept_spans() as exporter, stages.stage_of_call("generate"):
            async with encoding(encode, prefill, prompt.inputs[:1]) as (calls, sources):
                await asyncio.gather(prompt.check(prefill, sources), *map(rest_of, calls))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    parents = {
        "encode.call": "generate",
        "encoder.transfer": "generate",
        "encoder.send": "encoder.transfer",
    }
    for name, parent in parents.items():
        assert spans[name].parent.span_id == spans[parent].context.span_id
    assert spans["encode.call"].attributes["baton.worker"] == encode.id
    assert spans["encoder.transfer"].attributes["baton.transfer.num_blocks"] == 1


async def load_of(member: Member) -> admin_pb2.GetLoadResponse:
    return await member.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=TIMEOUT)


async def test_load_counts_encode_jobs_and_encoder_blocks(prompt):
    async with crew_of(prompt.path, "encode", **room_for_one(prompt)) as crew:
        (encode,) = crew.members
        first, second = prompt.inputs
        held, _ = encode.to_encode(first, "other")
        await encoded(held)
        waiting, _ = encode.to_encode(second, "other")
        await until(lambda: waiting_of(encode) == 1)
        load = await load_of(encode)
        assert (load.num_encode_jobs, load.num_waiting_encode_jobs) == (2, 1)
        assert load.num_waiting_encoder_tokens == second.length
        num_blocks = load.num_encoder_blocks
        assert load.num_held_encoder_blocks == num_blocks > 0
        held.cancel()
        await encoded(waiting)
        waiting.cancel()
        await crew.nothing_held()
        load = await load_of(encode)
        assert (load.num_encode_jobs, load.num_waiting_encoder_tokens) == (0, 0)
        assert (load.num_held_encoder_blocks, load.num_cached_encoder_blocks) == (0, num_blocks)


async def test_load_counts_encoder_leases_and_transfers(prompt):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        async with encoding(encode, prefill, prompt.inputs) as (calls, sources):
            for call in calls:
                await encoded(call)
            assert (await load_of(encode)).num_leases == 2
            await prompt.check(prefill, sources)
            await crew.nothing_held()
            assert (await load_of(encode)).num_leases == 0
        load = await load_of(prefill)
        assert (load.num_transfers, load.num_failed_transfers) == (2, 0)
        assert load.num_transferred_bytes > 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lease_id": b"short"}, "lease_id"),
    ({"claimant": ""}, "claimant"),
    ({"encoder_input": None}, "encoder_input.content_hash"),
    ({"encoder_input": {"length": 3}}, "encoder_input"),
    ({"encoder_input": {"length": 2**31}}, "encoder_input"),
    ({"encoder_input": {"tensors": {}}}, "encoder_input.tensors"),
]


async def test_encode_worker_refuses_invalid_request_by_field(prompt):
    async with crew_of(prompt.path, "encode", "prefill") as crew:
        encode, prefill = crew.members
        for changes, match in REFUSED:
            wrong = request_for(prompt, prefill, **changes)
            await check_refused(encode, wrong, InvalidArgumentError, match)
        good = request_for(prompt, prefill)
        call = encode.encode.Encode(good, timeout=TIMEOUT)
        await encoded(call)
        await check_refused(encode, good, AlreadyExistsError, "an id is used once")
        call.cancel()
        await encode.membership.drain()
        await check_refused(encode, request_for(prompt, prefill), UnavailableError, "draining")


async def test_encoder_only_worker_hands_outputs_over(prompt_of):
    prompt = prompt_of("mistral3")
    only = {"encoder_only": True}
    async with crew_of(prompt.path, "encode", "prefill", encode=only) as crew:
        encode, prefill = crew.members
        async with encoding(encode, prefill, prompt.inputs) as (calls, sources):
            for call in calls:
                assert not (await encoded(call)).was_cached
            await prompt.check(prefill, sources)
        assert encode.num_encoded_tokens == prompt.num_tokens_of_images
        assert prefill.num_fetched_outputs == len(prompt.inputs)
        assert prefill.num_encoded_tokens == 0


async def test_encoder_only_worker_refuses_other_roles(prompt):
    async with crew_of(prompt.path, "encode", encoder_only=True) as crew:
        (member,) = crew.members
        for role in (inference_pb2.WORKER_ROLE_PREFILL, inference_pb2.WORKER_ROLE_DECODE):
            failure = await failure_of(member.set_role(role))
            assert isinstance(failure, FailedPreconditionError)
            assert "stays in the encode role: it has loaded the encoder alone" in str(failure)
        await member.set_role(inference_pb2.WORKER_ROLE_ENCODE)  # which it has
        decoding, _ = member.to_decode(prompt.tokens, GREEDY)
        prefilling = member.prefill.Prefill(member.prefill_request(prompt.tokens), timeout=TIMEOUT)
        for call in (decoding, prefilling):
            failure = await failure_of(call)
            assert isinstance(failure, UnavailableError)
            assert "for good: it has loaded the encoder alone" in str(failure)


async def test_worker_without_encoder_serves_no_encode_role(prompt, checkpoint):
    async with crew_of(checkpoint("llama"), "prefill") as crew:
        (member,) = crew.members
        request = request_for(prompt, member, only_cached=True)
        await check_refused(member, request, FailedPreconditionError, "takes no images")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await member.set_role(inference_pb2.WORKER_ROLE_ENCODE)
        assert isinstance(error_of(refused.value), FailedPreconditionError)
        assert member.membership.role == "prefill"
    with pytest.raises(FailedPreconditionError, match="takes no images"):
        async with crew_of(checkpoint("llama"), "encode"):
            pass


def request_for(prompt: Prompt, other: Member, **changes: Any) -> encode_pb2.EncodeRequest:
    wanted = prompt.inputs[0]
    given = changes.pop("encoder_input", {})
    message = None if given is None else encoder_input_to_message(replace(wanted, **given))
    fields: dict[str, Any] = {
        "lease_id": new_lease_id(),
        "encoder_input": message,
        "claimant": other.id,
    }
    return encode_pb2.EncodeRequest(**{**fields, **changes})


async def check_refused(
    member: Member, request: encode_pb2.EncodeRequest, error: type[BatonError], match: str
) -> None:
    failure = await failure_of(member.encode.Encode(request, timeout=TIMEOUT))
    assert isinstance(failure, error), match
    assert re.search(match, str(failure))
