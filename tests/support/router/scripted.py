"""Workers that say what a test gives, behind real servers, and a saga to run against them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc

from baton.cluster.prefix import PrefixNamespace
from baton.errors import BatonError
from baton.models import locate
from baton.models.images.encoder_input import EncoderInput
from baton.rpc.backoff import Backoff
from baton.sampling import SamplingParams
from baton.serving.deadline import Deadline
from baton.serving.grpc.channels import Channels
from baton.serving.grpc.coalescer import Coalescer
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.serving.tenant import Tenant
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2_grpc,
    kv_sharing_pb2,
    kv_sharing_pb2_grpc,
    kv_transfer_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from baton.v1 import inference_pb2 as pb
from baton_router.apis.grpc.client_wire import to_message
from baton_router.call.ending import FinishReason
from baton_router.call.prompt import NO_PROMPT, Prompt
from baton_router.call.request import ANONYMOUS, Request
from baton_router.lifecycle.answers.answer import Answer
from baton_router.lifecycle.attempts.attempt import SOURCE_TIMEOUT
from baton_router.lifecycle.recovery import Recovery
from baton_router.lifecycle.request_lifecycle import RequestLifecycle
from baton_router.lifecycle.retry_budget import RetryBudget
from baton_router.routing.fleet.circuit_breaker import CircuitBreaker
from baton_router.routing.fleet.pending_prefixes import PendingPrefixes
from baton_router.routing.fleet.worker_model import PoolModel, WorkerModel
from baton_router.routing.placement.decision import Rules
from baton_router.routing.placement.placement import Candidate
from baton_router.routing.placement.placer import Placer
from baton_router.text.model_card import ModelCard, read_model_card
from tests.support.router.records import RECORD
from tests.support.waiting import until

HANDOFFS = Rules(conditional_disaggregation=False)
NO_PAUSES = Backoff(0.001, 0.002)


@cache
def card() -> ModelCard:
    return read_model_card(locate("tiny"))


@cache
def letter_ids() -> list[int]:
    """Tokens of "a", "b", "c", "d", "e"."""
    return [card().tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "abcde"]


class Cue:
    """A step of a script: waits until the test, or the other worker's script, says go."""

    def __init__(self) -> None:
        self.event = asyncio.Event()


class Go:
    """A step of a script that gives a cue."""

    def __init__(self, cue: Cue) -> None:
        self.cue = cue


class Forever:
    """A step of a script that waits until the call is cancelled."""


class Vanish:
    """A step of a script that ends the call without a word, after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Scripts(list[list[Any]]):
    """A script for each call of a worker, the last one for all that follow."""


@dataclass
class Worker(
    prefill_pb2_grpc.PrefillServicer,
    decode_pb2_grpc.DecodeServicer,
    encode_pb2_grpc.EncodeServicer,
    kv_sharing_pb2_grpc.KvSharingServicer,
):
    """Plays its script for every call, and notes the calls, and how much of it was taken."""

    name: str
    role: str
    script: list[Any]
    requests: list[Any] = field(default_factory=list)
    ended: list[decode_pb2.EndSequenceRequest] = field(default_factory=list)
    num_running: int = 0
    num_sent_messages: int = 0
    endpoint: str = ""
    load: int = 0
    num_queued: int = 0
    num_encoding: int = 0
    num_losses: int = 0
    num_failures: int = 0
    circuit: CircuitBreaker = field(default_factory=CircuitBreaker)
    model: WorkerModel = field(default_factory=lambda: WorkerModel(PoolModel()))
    bytes_per_token: float = 0.0
    namespace: PrefixNamespace = RECORD.namespace
    orders: list[decode_pb2.HandOverRequest] = field(default_factory=list)
    was_ordered: Cue = field(default_factory=Cue)
    cached: int = 0
    is_away: bool = False
    content: bytes = b""
    share_script: list[Any] = field(default_factory=list)
    share_requests: list[kv_sharing_pb2.ShareRequest] = field(default_factory=list)

    async def _play(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.num_running += 1
        script = self.script
        if isinstance(script, Scripts):
            script = script[min(len(self.requests), len(script)) - 1]
        try:
            for step in script:
                match step:
                    case BatonError():
                        raise step
                    case Cue():
                        await step.event.wait()
                    case Go():
                        step.cue.event.set()
                    case Vanish():
                        await asyncio.sleep(step.seconds)
                        await context.abort(grpc.StatusCode.CANCELLED)
                    case Forever():
                        await asyncio.Event().wait()
                    case _:
                        yield self._with_lease(step)
                        self.num_sent_messages += 1
        finally:
            self.num_running -= 1

    def _with_lease(self, step: Any) -> Any:
        """That it has stopped is said with the lease of the order to stop."""
        is_decode = isinstance(step, decode_pb2.DecodeGenerateResponse)
        if is_decode and step.HasField("suspended") and self.orders:
            step.suspended.lease_id = self.orders[-1].lease_id
        return step

    async def Prefill(self, request, context):  # noqa: N802
        async for response in self._play(request, context):
            yield response

    async def Pool(self, request, context):  # noqa: N802
        async for response in self._play(request, context):
            yield response

    async def Generate(self, request, context):  # noqa: N802
        async for response in self._play(request, context):
            yield response

    async def Encode(self, request, context):  # noqa: N802
        async for response in self._play(request, context):
            yield response

    async def EndSequence(self, request, context):  # noqa: N802
        self.ended.append(request)
        return decode_pb2.EndSequenceResponse()

    async def HandOver(self, request, context):  # noqa: N802
        self.orders.append(request)
        self.was_ordered.event.set()
        return decode_pb2.HandOverResponse()

    async def Share(self, request, context):  # noqa: N802
        self.share_requests.append(request)
        self.num_running += 1
        try:
            for step in self.share_script:
                match step:
                    case BatonError():
                        raise step
                    case Forever():
                        await asyncio.Event().wait()
                    case _:
                        yield step
        finally:
            self.num_running -= 1

    # What a saga sees of a `Member`.

    @property
    def record(self) -> Any:
        return self

    id = property(lambda self: self.name)
    kv_endpoint = property(lambda self: self.endpoint)
    epoch = 1
    block_size = 16
    max_num_seqs = 256
    version = "1.2.3"
    fingerprint = b"model"
    layouts = (kv_transfer_pb2.KvLayout(block_size=16),)

    @contextmanager
    def loaded(
        self,
        *,
        num_sequences: int = 1,
        num_tokens: int = 0,
        num_held_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> Iterator[None]:
        self.load += num_sequences
        self.num_queued += num_tokens
        self.num_encoding += num_encoder_tokens
        try:
            yield
        finally:
            self.load -= num_sequences
            self.num_queued -= num_tokens
            self.num_encoding -= num_encoder_tokens


class FakeFleet:
    """Some workers, in the order in which they are preferred."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.channels = Channels()
        self.pending = PendingPrefixes()
        self.noted: list[tuple[str | bytes, ...]] = []
        self.is_discovered = asyncio.Event()
        self.is_discovered.set()
        self.num_awaiting_change = 0
        self.changed = asyncio.Condition()

    async def wait_for_change(self) -> None:
        self.num_awaiting_change += 1
        try:
            async with self.changed:
                await self.changed.wait()
        finally:
            self.num_awaiting_change -= 1

    async def note_change(self) -> None:
        """Wakes all that wait for a change."""
        async with self.changed:
            self.changed.notify_all()

    async def hash_ahead(self, prompt: Prompt) -> None:
        pass

    def candidates(self, prompt: Prompt = NO_PROMPT) -> list[Candidate]:
        """A worker that was told to hand over drains. Encode workers are chosen by tests alone."""
        return [
            Candidate(
                w.name,
                w.role,  # type: ignore[arg-type]
                b"",
                w.cached,
                num_queued_tokens=i,
                num_sequences=i,
                excluded="not answering" if w.is_away else "draining" if w.orders else "",
            )
            for i, w in enumerate(self.workers)
            if w.role != "encode"
        ]

    def member(self, name: str) -> Worker:
        return next(w for w in self.workers if w.name == name)

    @contextmanager
    def channel_to(self, member: Worker) -> Iterator[grpc.aio.Channel]:
        yield self.channels.get(member.endpoint)

    def report_loss(self, member: Worker) -> None:
        member.num_losses += 1

    def report_failure(self, member: Worker) -> None:
        member.num_failures += 1

    def note_held(self, member: Worker, hashes: list[bytes]) -> None:
        self.noted.append((member.name, *hashes))


@asynccontextmanager
async def fleet_of(*workers: Worker) -> AsyncIterator[FakeFleet]:
    fleet, servers = FakeFleet(list(workers)), []
    for worker in workers:
        server = Server(ServingSettings())
        server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, worker)
        server.add(decode_pb2_grpc.add_DecodeServicer_to_server, worker)
        server.add(encode_pb2_grpc.add_EncodeServicer_to_server, worker)
        server.add(kv_sharing_pb2_grpc.add_KvSharingServicer_to_server, worker)
        await server.start()
        worker.endpoint = server.endpoint
        servers.append(server)
    try:
        yield fleet
        await until(
            lambda: not any(w.num_running or w.load or w.num_encoding for w in workers), within=1.0
        )
    finally:
        await fleet.channels.close()
        for server in servers:
            await server.stop(0.0)


def lifecycle_of(
    fleet: FakeFleet,
    priority: int = 0,
    received: tuple[tuple[int, ...], ...] = (),
    endings: tuple[FinishReason | None, ...] = (),
    tenant: Tenant = ANONYMOUS,
    budget: RetryBudget | None = None,
    pauses: Backoff = NO_PAUSES,
    seconds: float = 10.0,
    coalescer: Coalescer | None = None,
    rules: Rules = HANDOFFS,
    prompt: tuple[int, ...] = (5, 6, 7),
    encoder_inputs: tuple[EncoderInput, ...] = (),
    placer: Placer | None = None,
    source_timeout: float = SOURCE_TIMEOUT,
    content: bytes = b"",
    **params: Any,
) -> RequestLifecycle:
    sampling = SamplingParams(**{"max_tokens": 5, **params})
    request = Request(
        "r",
        prompt,
        sampling,
        priority,
        received,
        endings,
        tenant,
        encoder_inputs=encoder_inputs,
        content=content,
    )
    recovery = Recovery("r", budget or RetryBudget(), pauses)
    answer = Answer(request, card(), time.monotonic())
    deadline = Deadline.after(seconds)
    placer = placer or Placer(fleet, rules)  # type: ignore[arg-type]
    return RequestLifecycle(
        request,
        fleet,  # type: ignore[arg-type]
        placer,
        answer,
        recovery,
        deadline,
        coalescer,
        source_timeout=source_timeout,
    )


@dataclass
class Seen:
    token_ids: list[int]
    text: str
    finished: pb.Finished
    accepted: pb.Accepted


async def run(fleet: FakeFleet, **params: Any) -> Seen:
    return await seen_of(lifecycle_of(fleet, **params))


async def run_on(*workers: Worker, **params: Any) -> Seen:
    async with fleet_of(*workers) as fleet:
        return await run(fleet, **params)


async def messages_of(lifecycle: RequestLifecycle) -> AsyncGenerator[pb.GenerateResponse, None]:
    """The request's events as a client of gRPC gets them."""
    async with aclosing(lifecycle.run()) as events:
        async for event in events:
            yield to_message(event)


async def seen_of(lifecycle: RequestLifecycle) -> Seen:
    seen = Seen([], "", pb.Finished(), pb.Accepted())
    async for event in messages_of(lifecycle):
        seen.token_ids += event.tokens.token_ids
        seen.text += event.tokens.text
        if event.HasField("finished"):
            seen.finished = event.finished
        if event.HasField("accepted"):
            seen.accepted = event.accepted
    return seen


# What workers say.

PREFILL_ADMITTED = prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted())
RELEASED = prefill_pb2.PrefillResponse(released=prefill_pb2.LeaseReleased())
ADMITTED = decode_pb2.DecodeGenerateResponse(admitted=decode_pb2.DecodeAdmitted())


def first(reason: int = 0, logprob: float | None = None) -> prefill_pb2.PrefillResponse:
    token = prefill_pb2.FirstToken(token_id=letter_ids()[0], finish_reason=reason, logprob=logprob)
    return prefill_pb2.PrefillResponse(result=prefill_pb2.PrefillResult(first_tokens=[token]))


def tokens(start: int, *letters: int, reason: int = 0) -> decode_pb2.DecodeGenerateResponse:
    ids = [letter_ids()[i] for i in letters]
    return decode_pb2.DecodeGenerateResponse(
        tokens=decode_pb2.DecodeTokens(position=start, token_ids=ids, finish_reason=reason)
    )


DRAINING = decode_pb2.DecodeGenerateResponse(draining=decode_pb2.DecodeDraining())
HANDED_OVER = decode_pb2.DecodeGenerateResponse(released=prefill_pb2.LeaseReleased())


def suspended(num_tokens: int) -> decode_pb2.DecodeGenerateResponse:
    return decode_pb2.DecodeGenerateResponse(
        suspended=decode_pb2.DecodeSuspended(num_tokens=num_tokens)
    )


def finished(reason: int = pb.FINISH_REASON_LENGTH) -> decode_pb2.DecodeGenerateResponse:
    return decode_pb2.DecodeGenerateResponse(finished=decode_pb2.DecodeFinished(reason=reason))


def prefill(*script: Any, name: str = "p0") -> Worker:
    return Worker(name, "prefill", [PREFILL_ADMITTED, *script])


def decode(*script: Any, name: str = "d0") -> Worker:
    return Worker(name, "decode", [ADMITTED, *script])


READY = decode_pb2.DecodeGenerateResponse(kv_ready=decode_pb2.KvReady(num_transferred_blocks=2))


def at(position: int) -> prefill_pb2.PrefillResponse:
    """The result of a prefill behind so many tokens of the output."""
    token = prefill_pb2.FirstToken(token_id=letter_ids()[position], position=position)
    return prefill_pb2.PrefillResponse(result=prefill_pb2.PrefillResult(first_tokens=[token]))


def of(index: int, event: decode_pb2.DecodeGenerateResponse) -> decode_pb2.DecodeGenerateResponse:
    """The same of another sequence."""
    getattr(event, event.WhichOneof("event")).sequence_index = index
    return event


def answering() -> tuple[Worker, Worker]:
    """A prefill and a decode worker that answer every request with two tokens."""
    return prefill(first(), RELEASED), decode(READY, tokens(1, 1), finished())


def prefill_behind(*positions: int) -> Worker:
    """Prefills the prompt, and again with so many tokens of output."""
    scripts = [[PREFILL_ADMITTED, first() if p == 0 else at(p), RELEASED] for p in positions]
    return Worker("p0", "prefill", Scripts(scripts))
