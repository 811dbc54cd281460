"""Encoder leases of an attempt: calls of encode workers beside those of the other two."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.errors import CancelledError, InternalError, NotFoundError, UnavailableError
from baton.models.images.encoder_input import EncoderInput, TensorData
from baton.rpc.encoder_inputs import encoder_input_to_message
from baton.sampling import SamplingParams
from baton.serving.telemetry import stages
from baton.serving.tenant import Tenant
from baton.v1 import encode_pb2, prefill_pb2
from baton_router.call.request import Request, RequestOutcome
from baton_router.call.usage import ENCODED_BY, Account, EncodedInput, Timings
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.routing.placement.encoder_sources import EncoderChoice
from baton_router.telemetry.request_meter import RequestMeter
from tests.support.router.encoding import EncodingPlacer
from tests.support.router.scripted import (
    DRAINING,
    HANDED_OVER,
    READY,
    RELEASED,
    Cue,
    FakeFleet,
    Forever,
    Go,
    Vanish,
    Worker,
    decode,
    finished,
    first,
    fleet_of,
    lifecycle_of,
    prefill,
    prefill_behind,
    seen_of,
    suspended,
    tokens,
)
from tests.support.spans import kept_spans
from tests.support.waiting import until

PIXELS = TensorData("float32", (1, 3, 50, 50), bytes(range(250)) * 120)
IMAGES = (
    EncoderInput(b"a" * 16, start=1, length=20, tensors={"pixel_values": PIXELS}),
    EncoderInput(b"b" * 16, start=30, length=4, tensors={"pixel_values": PIXELS}),
)
PROMPT = tuple(range(5, 45))
REMOTE, LOCAL = EncoderChoice(0, 20, "e0"), EncoderChoice(1, 4)
ENCODE_ADMITTED = encode_pb2.EncodeResponse(admitted=encode_pb2.EncodeAdmitted())
ENCODE_RELEASED = encode_pb2.EncodeResponse(released=prefill_pb2.LeaseReleased())


def encoded(was_cached: bool = False) -> encode_pb2.EncodeResponse:
    event = encode_pb2.Encoded(was_cached=was_cached)
    event.queue_time.FromMilliseconds(3)
    event.elapsed.FromMilliseconds(5)
    event.work_done.busy.FromMilliseconds(5)
    event.work_done.num_steps, event.work_done.num_encoder_tokens = 1, 20
    return encode_pb2.EncodeResponse(encoded=event)


def encoder(*script: Any) -> Worker:
    """An encode worker that admits, then plays the script."""
    return Worker("e0", "encode", [ENCODE_ADMITTED, *script])


def good_encoder() -> Worker:
    return encoder(encoded(), ENCODE_RELEASED)


def answering(*steps: Any) -> Worker:
    """A decode worker that plays the steps, then answers."""
    return decode(READY, *steps, tokens(0, 0, 1, 2, 3, 4), finished())


def lifecycle(
    fleet: FakeFleet, *choices: EncoderChoice, is_alone: bool = False, **how: Any
) -> RequestLifecycle:
    placer = EncodingPlacer(fleet, lambda _: choices, is_alone=is_alone)
    return lifecycle_of(fleet, prompt=PROMPT, encoder_inputs=IMAGES, placer=placer, **how)


def ways(running: RequestLifecycle) -> dict[str, int]:
    """Returns how many inputs were encoded at each source."""
    told = [encoded.source for encoded in running.account.encoded_inputs]
    return {source: told.count(source) for source in ENCODED_BY if source in told}


async def answered(running: RequestLifecycle, gate: Cue, num_encoded: int = 1) -> None:
    """Runs a request whose workers wait at the gate until so many inputs are encoded."""
    seen = asyncio.create_task(seen_of(running))
    await until(lambda: len(running.account.encoded_inputs) == num_encoded, within=5.0)
    gate.event.set()
    assert (await seen).text == "abcde"


async def test_prefill_worker_gets_source_of_remote_input():
    gate, source = Cue(), good_encoder()
    computing, answers = prefill(gate, first(), RELEASED), answering(gate)
    async with fleet_of(computing, answers, source) as fleet:
        running = lifecycle(fleet, REMOTE, LOCAL, priority=3)
        seen = asyncio.create_task(seen_of(running))
        # The encode worker has the output, and once its lease is released the prefill worker, too.
        await until(lambda: ("p0", b"a" * 16) in fleet.noted, within=5.0)
        assert ("e0", b"a" * 16) in fleet.noted
        gate.event.set()
        assert (await seen).text == "abcde"
    (asked,), (call,) = source.requests, computing.requests
    (named,) = call.encoder_sources
    assert (named.input, named.worker, named.endpoint, named.epoch) == (0, "e0", source.endpoint, 1)
    assert asked.lease_id == named.lease_id != call.lease_id
    assert (asked.claimant, asked.tenant, asked.priority) == ("p0", call.tenant, 3)
    assert asked.request_id == f"r.{asked.lease_id.hex()[:12]}"
    assert not asked.only_cached
    assert asked.encoder_input == encoder_input_to_message(IMAGES[0])
    assert list(call.encoder_inputs) == list(map(encoder_input_to_message, IMAGES))
    assert not answers.requests[0].encoder_sources
    assert ways(running) == {"local": 1, "encode": 1}
    (seconds,) = [one.seconds for one in running.account.encoded_inputs if one.source == "encode"]
    assert 0 < seconds < 10


async def test_decode_worker_alone_gets_source_of_remote_input():
    gate, source = Cue(), good_encoder()
    answers = decode(gate, tokens(0, 0, 1, 2, 3, 4), finished())
    async with fleet_of(prefill(), answers, source) as fleet:
        running = lifecycle(fleet, REMOTE, LOCAL, is_alone=True, tenant=Tenant("acme"))
        await answered(running, gate, num_encoded=2)
    (asked,), (call,) = source.requests, answers.requests
    (named,) = call.encoder_sources
    assert (named.worker, named.lease_id, asked.claimant) == ("e0", asked.lease_id, "d0")
    assert asked.tenant == call.tenant == "acme"
    assert not call.HasField("handle")


async def test_cached_input_is_requested_without_tensors():
    gate, source = Cue(), encoder(encoded(was_cached=True), ENCODE_RELEASED)
    async with fleet_of(prefill(gate, first()), answering(gate), source) as fleet:
        running = lifecycle(fleet, replace(REMOTE, only_cached=True))
        await answered(running, gate)
    (asked,) = source.requests
    assert asked.only_cached
    assert (asked.encoder_input.content_hash, asked.encoder_input.length) == (b"a" * 16, 20)
    assert not asked.encoder_input.tensors
    assert ways(running) == {"cached_remote": 1}


async def test_encoder_load_is_of_source_until_it_has_encoded():
    encoding, computed, gate = Cue(), Cue(), Cue()
    source, computing = encoder(encoding, encoded(), Forever()), prefill(computed, first())
    async with fleet_of(computing, answering(gate), source) as fleet:
        seen = asyncio.create_task(seen_of(lifecycle(fleet, REMOTE, LOCAL)))
        # The prompt's call waits for nothing at the encode worker.
        await until(lambda: source.requests and computing.requests, within=5.0)
        assert (source.load, source.num_encoding, computing.num_encoding) == (1, 20, 4)
        remote, local = [[each.content_hash] for each in IMAGES]
        assert fleet.pending.match(remote).keys() == {"e0", "p0"}
        assert fleet.pending.match(local).keys() == {"p0"}
        encoding.event.set()
        await until(lambda: not source.num_encoding, within=5.0)
        assert (source.load, source.num_running, computing.num_encoding) == (0, 1, 4)
        assert fleet.pending.match(remote).keys() == {"p0"}
        computed.event.set()  # and the output was not needed
        await until(lambda: not source.num_running and not computing.num_encoding, within=5.0)
        assert not fleet.pending.match(remote) | fleet.pending.match(local)
        gate.event.set()
        assert (await seen).text == "abcde"


@pytest.mark.parametrize(
    ("script", "num_failures", "num_losses"),
    [
        pytest.param([UnavailableError("draining")], 0, 0, id="refuses"),
        pytest.param([NotFoundError("it was evicted")], 0, 0, id="has it no more"),
        pytest.param([ENCODE_ADMITTED, InternalError("a defect")], 1, 0, id="fails"),
        pytest.param([ENCODE_ADMITTED, Vanish(0.0)], 0, 1, id="dies"),
        pytest.param([], 0, 0, id="ends at once"),
        pytest.param([ENCODE_ADMITTED], 0, 0, id="ends early"),
        pytest.param([encoded()], 0, 0, id="skips its admission"),
        pytest.param([ENCODE_ADMITTED, ENCODE_RELEASED], 0, 0, id="skips the output"),
    ],
)
async def test_claimant_encodes_what_source_fails_to(script, num_failures, num_losses):
    gate, source = Cue(), Worker("e0", "encode", script)
    computing, answers = prefill(gate, first()), answering(gate)
    async with fleet_of(computing, answers, source) as fleet:
        running = lifecycle(fleet, REMOTE)
        seen = asyncio.create_task(seen_of(running))
        await until(lambda: ways(running) == {"failed": 1}, within=5.0)
        assert (source.load, source.num_encoding, computing.num_encoding) == (0, 0, 20)
        gate.event.set()
        assert (await seen).text == "abcde"
    assert len(computing.requests) == len(answers.requests) == 1
    assert (source.num_failures, source.num_losses) == (num_failures, num_losses)
    assert computing.num_failures == computing.num_losses == 0


async def test_claimant_encodes_when_source_dies_before_release():
    gate, source = Cue(), encoder(encoded(), Vanish(0.0))
    computing = prefill(gate, first())
    async with fleet_of(computing, answering(gate), source) as fleet:
        running = lifecycle(fleet, REMOTE)
        seen = asyncio.create_task(seen_of(running))
        await until(lambda: computing.num_encoding == 20, within=5.0)
        gate.event.set()
        assert (await seen).text == "abcde"
    assert source.num_losses == 1
    assert ways(running) == {"encode": 1, "failed": 1}


async def test_encode_call_is_cancelled_when_prefill_fails():
    source, computing = encoder(Forever()), Worker("p0", "prefill", [Cue(), Vanish(0.0)])
    async with fleet_of(computing, decode(Forever()), source) as fleet:
        seen = asyncio.create_task(seen_of(lifecycle(fleet, REMOTE)))
        await until(lambda: source.num_sent_messages, within=5.0)
        computing.script[0].event.set()
        with pytest.raises(UnavailableError):
            await seen
        assert source.num_encoding == 0


async def test_encode_call_is_cancelled_when_client_aborts():
    source, computing = encoder(Forever()), prefill(Forever())
    async with fleet_of(computing, decode(Forever()), source) as fleet:
        running = lifecycle(fleet, REMOTE)
        seen = asyncio.create_task(seen_of(running))
        await until(lambda: source.num_sent_messages and computing.num_sent_messages, within=5.0)
        running.abort()
        with pytest.raises(CancelledError):
            await seen


async def test_no_encode_call_when_decode_worker_refuses():
    refusing, source = Worker("d0", "decode", [UnavailableError("draining")]), good_encoder()
    async with fleet_of(prefill(), refusing, source) as fleet:
        with pytest.raises(UnavailableError):
            await seen_of(lifecycle(fleet, REMOTE))
    assert not source.requests


async def test_next_attempt_leases_again():
    # Workers answer once both calls of an attempt are there: a lease ends with its prompt.
    gates = Cue(), Cue()
    failing = decode(READY, tokens(0, 0, 1, 2), UnavailableError("it has stopped"))
    second = decode(READY, tokens(3, 3), tokens(4, 4), finished(), name="d1")
    computing, source = prefill_behind(0, 3), good_encoder()
    for script, gate in zip(computing.script, gates, strict=True):
        script.insert(1, gate)
    async with fleet_of(computing, failing, second, source) as fleet:
        placer = EncodingPlacer(fleet, ((REMOTE,), (EncoderChoice(1, 4, "e0"),)).__getitem__)
        running = lifecycle_of(fleet, prompt=PROMPT, encoder_inputs=IMAGES, placer=placer)
        seen = asyncio.create_task(seen_of(running))
        for number, gate in enumerate(gates, 1):
            await until(lambda number=number: len(source.requests) == number, within=5.0)
            gate.event.set()
        assert (await seen).text == "abcde"
    leases = [asked.lease_id for asked in source.requests]
    assert len(set(leases)) == 2
    sources = [call.encoder_sources[0] for call in computing.requests]
    assert [(one.input, one.lease_id) for one in sources] == list(enumerate(leases))


async def test_live_migration_names_no_encoder_source():
    gate, taken = Cue(), Cue()
    giving = decode(READY, gate, tokens(0, 0, 1), DRAINING, name="d0")
    giving.script += [giving.was_ordered, tokens(2, 2), suspended(len(PROMPT) + 2)]
    giving.script += [taken, HANDED_OVER]
    taking = decode(READY, Go(taken), tokens(2, 2, 3), tokens(4, 4), finished(), name="d1")
    source = good_encoder()
    async with fleet_of(prefill(gate, first()), giving, taking, source) as fleet:
        await answered(lifecycle(fleet, REMOTE), gate)
    (resumed,) = taking.requests
    assert (resumed.handle.source_worker, len(resumed.encoder_sources)) == ("d0", 0)
    assert len(source.requests) == 1


async def test_success_of_encode_worker_resets_its_circuit():
    gate, source = Cue(), good_encoder()
    source.circuit.record_failure()
    async with fleet_of(prefill(gate, first()), answering(gate), source) as fleet:
        await answered(lifecycle(fleet, REMOTE), gate)
    for _ in range(2):
        source.circuit.record_failure()
    assert source.circuit.is_closed
    assert source.model.done.num_encoder_tokens == 20


def test_meter_counts_encoder_inputs_by_way():
    meter, account = RequestMeter("tiny"), Account(Timings(0.0), len(PROMPT))
    for encoded in (EncodedInput("local"), EncodedInput("encode", 0.02), EncodedInput("failed")):
        account.encoded(encoded)
    with meter.begin("chat", 0.0) as metered:
        metered.ended(RequestOutcome(Request("r", PROMPT, SamplingParams()), account))
    assert meter.num_encoder_inputs == {"local": 1, "encode": 1, "failed": 1}
    assert (sum(meter.encode.counts), meter.encode.total) == (1, 0.02)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    with kept_spans() as exporter:
        yield exporter


@pytest.mark.parametrize("fails", [False, True])
async def test_encode_span_tells_worker_tokens_and_times(exporter, fails):
    gate = Cue()
    source = encoder(UnavailableError("draining")) if fails else good_encoder()
    with stages.stage_of_call("generate") as root:
        async with fleet_of(prefill(gate, first()), answering(gate), source) as fleet:
            await answered(lifecycle(fleet, REMOTE), gate)
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "encode"]
    assert span.parent.span_id == root.get_span_context().span_id
    assert span.attributes["baton.worker"] == "e0"
    assert span.attributes["baton.encode.num_tokens"] == 20
    assert span.attributes["baton.encode.num_bytes"] == len(PIXELS.data)
    assert span.attributes.get("error.type") == ("UNAVAILABLE" if fails else None)
    if not fails:
        assert span.attributes["baton.encode.was_cached"] is False
        assert span.attributes["baton.encode.queue_ms"] == pytest.approx(3)
        assert span.attributes["baton.encode.step_ms"] == pytest.approx(5)
