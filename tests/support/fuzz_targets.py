"""Fuzz targets: readers of bytes from elsewhere, each a function of those bytes alone.

A target may refuse its input by raising a `BatonError`, or by the error that its package raises for
what it cannot read; anything else that it raises is a bug. Each has seeds: valid inputs.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from baton.cluster.events.kv_events import (
    SEQUENCE_BYTES,
    EventBatch,
    KvEvents,
    decode_sequence,
    decode_slots,
    encode_sequence,
)
from baton.cluster.registry.registry import WorkerRecord
from baton.context_length import ContextLength
from baton.engine.executor.cache.kv_layout import KvShape, plan_layout
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.request import KvSource, Purpose
from baton.engine.scheduler.plan import ExternalAllocation
from baton.errors import BatonError
from baton.models import locate
from baton.rpc.params import params_to_message
from baton.sampling import SamplingParams
from baton.serving.grpc.malformed import Malformed, tolerant
from baton.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton.worker.engine_messages import (
    engine_request,
    layouts_of,
    layouts_to_messages,
    serialize_layouts,
)
from baton.worker.pairing import Pairing
from baton_decode_worker.decode_messages import outputs, return_cost
from baton_kvtransfer.connector import Connector, Integrity, Offer, Receiver
from baton_kvtransfer.connectors.grpc.connector import GrpcConnector, PayloadReceiver
from baton_kvtransfer.lease.handle import Handle
from baton_kvtransfer.lease.handoff import Handoff
from baton_kvtransfer.offers import Offers, offer_by
from baton_kvtransfer.stream import frames
from baton_kvtransfer.stream.block_batch import BlockBatch, checksums_of
from baton_kvtransfer.stream.transfer_stream import TransferStream
from baton_kvtransfer.transfer_messages import (
    claim_of,
    first_token_of,
    handle_of,
    integrity_of,
    lease_id_of,
)
from baton_router.apis.grpc.call_wire import CallReader
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.request import Request
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.worker_wire import event_of
from baton_router.text.intake import Intake
from baton_router.text.model_card import ModelCard, read_model_card
from baton_router.text.request_bounds import RequestLimits

LAYOUT = plan_layout([KvShape(2, 8, 8)] * 2, torch.float32, 4, None)
PAIRING = Pairing("1.2.3", b"model", (LAYOUT,))
NUM_TOKENS = 12
TABLE = (3, 1, 2)
LEASE = bytes(range(16))


@dataclass(frozen=True)
class Target:
    """One reader of bytes. `read` returns nothing, and raises only for a bug."""

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def check(target: Target, data: bytes) -> None:
    """Reads it; a refusal is as good as an answer."""
    with contextlib.suppress(BatonError):
        target.read(data)


@cache
def card() -> ModelCard:
    return read_model_card(locate("tiny"))


def parsed(kind: type[Message], data: bytes) -> Any:
    """A request as a server of ours parses it. Raises what its caller would be told."""
    request = tolerant(kind.FromString)(data)
    if isinstance(request, Malformed):
        raise request.error
    return request


# What workers are asked.


def prefill(data: bytes) -> None:
    request = parsed(prefill_pb2.PrefillRequest, data)
    lease_id_of(request.lease_id)
    engine_request(request, None, purpose=Purpose.PREFILL)


def decode(data: bytes) -> None:
    request = parsed(decode_pb2.DecodeGenerateRequest, data)
    handle = handle_of(request.handle) if request.HasField("handle") else None
    engine_request(
        request,
        1.0,
        kv_source=KvSource.EXTERNAL if handle else KvSource.LOCAL,
        outputs=outputs(request),
        block_hashes=handle.block_hashes if handle else (),
        return_cost=return_cost(request),
    )
    if handle is not None:
        PAIRING.check(handle.pairing, handle.source_worker)


def end_sequence(data: bytes) -> None:
    parsed(decode_pb2.EndSequenceRequest, data)


def fetch(data: bytes) -> None:
    request = parsed(kv_transfer_pb2.FetchRequest, data)
    claim_of(request)
    connector = offers().connector(request)
    integrity_of(request.integrity or kv_transfer_pb2.INTEGRITY_XXH3_64).of(connector)
    other = Pairing(request.baton_version, request.fingerprint, layouts_of(request.layouts))
    PAIRING.check(other, request.claimant)


class NamedConnector(Connector):
    """Connector of which only the name and the offer matter."""

    def __init__(self, name: str) -> None:
        super().__init__(())
        self.name = name

    async def offer(self) -> Offer:
        return Offer()

    async def attach(self, offer: Offer) -> Receiver:
        raise NotImplementedError


@cache
def offers() -> Offers:
    opened = Offers([NamedConnector("shm"), GrpcConnector()])
    asyncio.run(opened.open())
    return opened


def confirm(data: bytes) -> None:
    claim_of(parsed(kv_transfer_pb2.ConfirmRequest, data))


# What they are told by each other.


def describe(data: bytes) -> None:
    message = parsed(kv_transfer_pb2.DescribeResponse, data)
    for name in ("shm", "nixl"):
        offer_by(NamedConnector(name), message.offers)


@cache
def pool() -> KvPool:
    return KvPool(LAYOUT, len(TABLE), torch.device("cpu"))


def payload(data: bytes) -> None:
    """One event of a Fetch, when it may come, all the way into the pool."""
    event = frames.decode(data)
    kind = "blocks" if isinstance(event, BlockBatch) else event and event.WhichOneof("event")
    num_held = len(TABLE) if kind == "result" else 0
    handoff = Handoff(NUM_TOKENS, (LAYOUT,), ExternalAllocation("r", (TABLE,), num_held))
    handoff.request()
    if kind == "manifest":
        handoff.open(event.manifest.generation, event.manifest.num_blocks)
        return
    handoff.open(1, len(TABLE))
    if isinstance(event, BlockBatch):
        targets = handoff.place(event)
        receiver = PayloadReceiver(TransferStream())
        asyncio.run(receiver.receive(event, pool(), targets, Integrity.CHECKSUMS))
    elif kind == "result":
        handoff.complete(first_token_of(event.result))


# What the router is told, and asked.


def _answer() -> Answer:
    params = SamplingParams(max_tokens=9, n=2, temperature=1.0, stop=("zz",), prompt_logprobs=1)
    return Answer(Request("r", (5, 6), params), card(), time.monotonic())


def prefill_event(data: bytes) -> None:
    single = Answer(Request("r", (5,), SamplingParams()), card(), time.monotonic())
    for answer in (_answer(), single):
        for event in answer.on_event(event_of(parsed(prefill_pb2.PrefillResponse, data))):
            to_message(event)


def decode_event(data: bytes) -> None:
    answer = _answer()
    computed = prefill_pb2.PrefillResponse(result=prefill_pb2.PrefillResult())
    answer.on_event(event_of(computed))
    for event in answer.on_event(event_of(parsed(decode_pb2.DecodeGenerateResponse, data))):
        to_message(event)
    answer.take_surplus()


def generate(data: bytes) -> None:
    request = parsed(pb.GenerateRequest, data)
    asyncio.run(
        Intake(card(), RequestLimits(max_prompt_bytes=4096)).read(
            CallReader(4096).generate_call(request), ContextLength(2048)
        )
    )


# What Redis holds.


def record(data: bytes) -> None:
    """Fields, each with two bytes of length before name and value."""
    fields, rest = {}, data
    while len(rest) >= 4:
        name, value = int.from_bytes(rest[:2]), int.from_bytes(rest[2:4])
        fields[rest[4 : 4 + name]] = rest[4 + name : 4 + name + value]
        rest = rest[4 + name + value :]
    for reader in (WorkerRecord.from_fields, EventBatch.from_fields):
        with contextlib.suppress(ValueError):  # what its readers expect
            reader(fields)


def snapshot(data: bytes) -> None:
    decode_sequence(data[:SEQUENCE_BYTES])
    with contextlib.suppress(ValueError):  # what its readers expect
        decode_slots(data[SEQUENCE_BYTES:])


def _fields(fields: dict[str, Any]) -> bytes:
    encoded = b""
    for name, value in fields.items():
        content = value if isinstance(value, bytes) else str(value).encode()
        key = name.encode()
        encoded += len(key).to_bytes(2) + len(content).to_bytes(2) + key + content
    return encoded


def _seeds() -> dict[str, tuple[bytes, ...]]:
    """Valid inputs of each target."""
    sampling = params_to_message(
        SamplingParams(max_tokens=4, stop=("a",), logprobs=True, top_logprobs=2)
    )
    handle = kv_transfer_pb2.KvHandle(
        version=1,
        source_worker="prefill-0",
        source_endpoint="127.0.0.1:1",
        source_epoch=7,
        lease_id=LEASE,
        baton_version="1.2.3",
        fingerprint=b"model",
        layouts=layouts_to_messages((LAYOUT,)),
        num_tokens=NUM_TOKENS,
        block_hashes=bytes(48),
        integrity=kv_transfer_pb2.INTEGRITY_XXH3_64,
        tenant="acme",
    )
    common = {"token_ids": range(1, 13), "num_prompt_tokens": 12, "sampling": sampling}
    read = handle_of(handle)
    assert isinstance(read, Handle)
    blocks = tuple(memoryview(bytes([i]) * LAYOUT.block_bytes) for i in range(3))
    run = BlockBatch(0, 0, checksums_of(blocks, LAYOUT.block_bytes), blocks)
    result = prefill_pb2.PrefillResult(
        first_tokens=[prefill_pb2.FirstToken(token_id=5, logprob=-0.5, position=0)]
    )
    scores = pb.PromptLogprobs(position=1, logprobs=[-1.0], top_logprobs=[pb.TopLogprobs()])
    tokens = decode_pb2.DecodeTokens(
        sequence_index=1, position=0, token_ids=[7, 8], logprobs=[-1.0, -2.0], finish_reason=2
    )
    conversation = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hello")])
    worker = WorkerRecord(
        "w", "decode", "a:1", "a:2", 3, "tiny", b"f", serialize_layouts((LAYOUT,)), b"t" * 16,
        "float32", 16, 2048, 100,
    )  # fmt: skip
    batch = EventBatch(1, 2, KvEvents((bytes(16),), (bytes(16),)))
    messages: dict[str, tuple[Message, ...]] = {
        "prefill": (
            prefill_pb2.PrefillRequest(request_id="r", lease_id=LEASE, decode_worker="d", **common),
        ),
        "decode": (
            decode_pb2.DecodeGenerateRequest(
                request_id="r",
                handle=handle,
                return_cost=decode_pb2.ReturnCost(
                    fixed=Duration(nanos=2_000_000), per_token=Duration(nanos=50_000)
                ),
                **common,
            ),
            decode_pb2.DecodeGenerateRequest(
                request_id="r",
                outputs=[
                    decode_pb2.SequenceOutput(token_ids=[3, 4]),
                    decode_pb2.SequenceOutput(is_complete=True),
                ],
                **{**common, "sampling": params_to_message(SamplingParams(n=2, temperature=1.0))},
            ),
        ),
        "end_sequence": (decode_pb2.EndSequenceRequest(request_id="r", sequence_index=1),),
        "fetch": (
            kv_transfer_pb2.FetchRequest(
                lease_id=LEASE,
                source_epoch=7,
                claimant="decode-0",
                baton_version="1.2.3",
                fingerprint=b"model",
                layouts=handle.layouts,
                tenant="acme",
                connector=kv_transfer_pb2.CONNECTOR_SHM,
                integrity=kv_transfer_pb2.INTEGRITY_FENCE,
            ),
        ),
        "confirm": (
            kv_transfer_pb2.ConfirmRequest(lease_id=LEASE, generation=1, claimant="decode-0"),
        ),
        "describe": (
            kv_transfer_pb2.DescribeResponse(
                epoch=7,
                offers=[
                    kv_transfer_pb2.KvOffer(
                        connector=kv_transfer_pb2.CONNECTOR_SHM, address="x", num_blocks=[8]
                    ),
                    kv_transfer_pb2.KvOffer(
                        connector=kv_transfer_pb2.CONNECTOR_NIXL,
                        metadata=b"agent",
                        num_blocks=[8],
                        regions=[kv_transfer_pb2.KvRegion(address=4096, device=0)],
                    ),
                ],
            ),
        ),
        "prefill_event": (
            prefill_pb2.PrefillResponse(result=result),
            prefill_pb2.PrefillResponse(prompt_logprobs=scores),
            prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(num_cached_tokens=1)),
        ),
        "decode_event": (
            decode_pb2.DecodeGenerateResponse(tokens=tokens),
            decode_pb2.DecodeGenerateResponse(
                finished=decode_pb2.DecodeFinished(sequence_index=1, reason=4, score=0.5)
            ),
            decode_pb2.DecodeGenerateResponse(
                kv_ready=decode_pb2.KvReady(num_transferred_blocks=3, connector="grpc")
            ),
        ),
        "generate": (
            pb.GenerateRequest(text="def main(", sampling=sampling),
            pb.GenerateRequest(chat=conversation, request_id="r", priority=1),
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[1, 2]),
                continue_from=[pb.ReceivedTokens(ids=[3], finish_reason=4)],
            ),
        ),
    }
    seeds = {name: tuple(m.SerializeToString() for m in each) for name, each in messages.items()}
    manifest = kv_transfer_pb2.FetchResponse(
        manifest=kv_transfer_pb2.Manifest(generation=1, num_blocks=3)
    )
    ending = kv_transfer_pb2.FetchResponse(result=result)
    return {
        **seeds,
        "payload": (frames.encode(run), frames.encode(manifest), frames.encode(ending)),
        "record": (_fields(worker.to_fields()), _fields(batch.to_fields())),
        "snapshot": (encode_sequence(3) + bytes(16) + b"x" * 16,),
    }


_READERS = (
    *(prefill, decode, end_sequence, fetch, confirm),
    *(describe, payload),
    *(prefill_event, decode_event, generate),
    *(record, snapshot),
)
_SEEDS = _seeds()
TARGETS = {read.__name__: Target(read, _SEEDS[read.__name__]) for read in _READERS}
