"""Workers that send what no worker may send: typed failures, and the request goes on elsewhere."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.engine.outputs import SequenceUpdate
from baton.engine.scheduler.plan import TokenLogprobs
from baton.sampling import SamplingParams
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import decode_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton_decode_worker.decode_messages import responses
from baton_router.call.request import Request
from baton_router.lifecycle.attempts.work_bounds import MAX_MESSAGE_TOKENS, WorkBounds
from baton_router.lifecycle.worker_wire import event_of
from tests.support.router.scripted import (
    ADMITTED,
    PREFILL_ADMITTED,
    READY,
    Worker,
    decode,
    finished,
    fleet_of,
    letter_ids,
    lifecycle_of,
    messages_of,
    of,
    prefill_behind,
    tokens,
)

VOCABULARY = 3072


def ids(position: int, *token_ids: int) -> decode_pb2.DecodeGenerateResponse:
    made = decode_pb2.DecodeTokens(position=position, token_ids=token_ids)
    return decode_pb2.DecodeGenerateResponse(tokens=made)


LIES: dict[str, tuple[bytes, str]] = {
    "too many tokens": (ids(1, *[5] * 5).SerializeToString(), "output token 6; expected at most 5"),
    "no such token": (ids(1, VOCABULARY).SerializeToString(), "token id 3072; the vocabulary has"),
    "no such sequence": (
        of(77, tokens(1, 1)).SerializeToString(),
        "tokens of sequence 77; expected one",
    ),
    "an end of no sequence": (
        of(77, finished()).SerializeToString(),
        "tokens of sequence 77; expected one",
    ),
    "no kind": (b"", "an event without a kind"),
    "garbage": (b"\xff\xfe\xfd" * 5, "a message that does not parse"),
    "millions of ids": (
        ids(1, *range(1_000_000)).SerializeToString(),
        "a message of 2983500 bytes",
    ),
    "more than gRPC takes": (ids(1, *[1] * 17 * 2**20).SerializeToString(), "too large a message"),
}


class Liar:
    """Server of a decode worker that admits a request, and sends a message once it is told to."""

    def __init__(self, lie: bytes, method: str, before: Sequence[bytes]) -> None:
        self.told = asyncio.Event()
        self._lie = lie
        self._before = before
        handler = grpc.unary_stream_rpc_method_handler(self._answer)
        service, _, name = method.rpartition("/")
        self._handler = grpc.method_handlers_generic_handler(service, {name: handler})

    def register(self, _servicer: object, server: Any) -> None:
        server.add_generic_rpc_handlers((self._handler,))

    async def _answer(self, _request: bytes, context: Any) -> None:
        for message in self._before:
            await context.write(message)
        await self.told.wait()
        await context.write(self._lie)
        await asyncio.Event().wait()


@asynccontextmanager
async def lying(worker: Worker, lie: bytes, method: str, *before: bytes) -> AsyncIterator[Liar]:
    """The worker is one that lies."""
    settings = ServingSettings(max_message_bytes=2**30)
    liar, server = Liar(lie, method, before), Server(settings)
    server.add(liar.register, object())
    await server.start()
    worker.endpoint = server.endpoint
    try:
        yield liar
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize(("lie", "problem"), LIES.values(), ids=LIES)
async def test_request_moves_on_when_decode_worker_lies(lie, problem, caplog):
    caplog.set_level(logging.INFO, "baton_router")
    liar_worker, other = decode(), decode(READY, tokens(2, 2, 3, 4), finished(), name="d1")
    before = [message.SerializeToString() for message in (ADMITTED, READY)]
    async with (
        fleet_of(prefill_behind(0, 1), liar_worker, other) as fleet,
        lying(liar_worker, lie, "baton.v1.Decode/Generate", *before) as liar,
    ):
        lifecycle, seen = lifecycle_of(fleet), list[int]()
        async for event in messages_of(lifecycle):
            seen += event.tokens.token_ids
            if seen:
                liar.told.set()
    assert seen == letter_ids()
    assert liar_worker.num_losses == 1
    assert other.num_losses == 0
    logged = [record for record in caplog.records if record.name.startswith("baton_router")]
    assert not any(record.exc_info for record in logged), "a traceback"
    (resumed,) = (r.getMessage() for r in logged if "resuming elsewhere" in r.getMessage())
    assert f"d0 sent {problem}" in resumed


PREFILL_LIES = {
    "no such token": prefill_pb2.PrefillResponse(
        result=prefill_pb2.PrefillResult(first_tokens=[prefill_pb2.FirstToken(token_id=VOCABULARY)])
    ),
    "two first tokens": prefill_pb2.PrefillResponse(
        result=prefill_pb2.PrefillResult(first_tokens=[prefill_pb2.FirstToken()] * 2)
    ),
    "scores beyond the prompt": prefill_pb2.PrefillResponse(
        prompt_logprobs=pb.PromptLogprobs(position=1, logprobs=[0.0] * 9)
    ),
}


@pytest.mark.parametrize("lie", PREFILL_LIES.values(), ids=PREFILL_LIES)
async def test_request_moves_on_when_prefill_worker_lies(lie):
    liar_worker = Worker("p0", "prefill", [])
    honest = prefill_behind(0)
    honest.name = "p1"
    decoding = decode(READY, tokens(1, 1, 2, 3, 4), finished())
    before = PREFILL_ADMITTED.SerializeToString()
    async with (
        fleet_of(liar_worker, honest, decoding) as fleet,
        lying(liar_worker, lie.SerializeToString(), "baton.v1.Prefill/Prefill", before) as liar,
    ):
        liar.told.set()
        seen = list[int]()
        async for event in messages_of(lifecycle_of(fleet)):
            seen += event.tokens.token_ids
    assert seen == letter_ids()
    assert liar_worker.num_losses == 1


@pytest.mark.parametrize("params", [{}, {"logprobs": True, "top_logprobs": 20}], ids=str)
def test_longest_message_of_a_worker_is_within_bounds(params):
    sampling = SamplingParams(max_tokens=100_000, **params)
    bounds = WorkBounds.of(Request("r", (5, 6), sampling), vocab_size=2**28)
    num_top, largest = sampling.top_logprobs, 2**28 - 1
    tops = TokenLogprobs(-1.0, (largest,) * num_top, (-1.0,) * num_top)
    updates = [SequenceUpdate("r", 0, largest, position, tops) for position in range(5000)]
    sent = list(responses(updates, sampling))
    assert sum(len(message.tokens.token_ids) for message in sent) == 5000
    for message in sent:
        assert message.ByteSize() <= bounds.max_message_bytes
        assert len(message.tokens.token_ids) <= MAX_MESSAGE_TOKENS // 4
        bounds.check(event_of(message))
