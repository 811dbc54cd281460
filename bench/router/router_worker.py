"""A worker that says what a benchmark tells it, and the bare relays the router is compared to.

`python -m bench.router.router_worker worker REDIS_URL`: a prefill and a decode worker in one
process, in Redis, that answer at once with tokens made up. `... relay ENDPOINT`: passes a decode
worker's messages on, as little as a grpc.aio server can do. Both print their endpoint, then answer
lines:

    pace SECONDS      (worker) between a stream's tokens from now on; 0: as fast as they are taken
    gather SECONDS    (worker) tokens that come due within so long go out in one message; 0: singly
    sent              (worker) when each message of the last stream was sent, as JSON
    cpu               seconds of CPU time this process has used
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.cluster.redis.client import connect
from baton.cluster.registry.registration import Registration
from baton.cluster.registry.registry import WorkerRecord, new_epoch
from baton.models import DEFAULT_MODEL, locate
from baton.serving.server import Server
from baton.serving.settings import ServingSettings
from baton.v1 import decode_pb2, decode_pb2_grpc, kv_transfer_pb2, prefill_pb2, prefill_pb2_grpc
from baton.v1 import inference_pb2 as pb
from baton.version import version
from baton_router.text.model_card import read_model_card

STREAM = "/baton.bench.Relay/Stream"
ADMIT = "/baton.bench.Relay/Admit"
MAX_MODEL_LEN = 1 << 20

_LAYOUT = kv_transfer_pb2.KvLayouts(layouts=[kv_transfer_pb2.KvLayout(block_size=16)])
_LETTER = 70  # any token that is text


class ScriptedWorker(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """Answers every request with `max_tokens` tokens."""

    def __init__(self) -> None:
        self.interval = 0.0
        self.gather = 0.0
        self.sent: list[float] = []

    async def Prefill(
        self, _request: prefill_pb2.PrefillRequest, _context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield prefill_pb2.PrefillResponse(admitted=prefill_pb2.PrefillAdmitted())
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        first = prefill_pb2.FirstToken(token_id=_LETTER)
        yield prefill_pb2.PrefillResponse(result=prefill_pb2.PrefillResult(first_tokens=[first]))
        yield prefill_pb2.PrefillResponse(released=prefill_pb2.LeaseReleased())

    async def Pool(
        self, _request: prefill_pb2.PoolRequest, _context: Any
    ) -> AsyncIterator[prefill_pb2.PoolResponse]:
        yield prefill_pb2.PoolResponse(admitted=prefill_pb2.PrefillAdmitted())
        yield prefill_pb2.PoolResponse(started=prefill_pb2.PrefillStarted())
        yield prefill_pb2.PoolResponse(result=prefill_pb2.PoolResult(values=[1.0]))

    async def Generate(
        self, request: decode_pb2.DecodeGenerateRequest, _context: Any
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        yield decode_pb2.DecodeGenerateResponse(admitted=decode_pb2.DecodeAdmitted())
        yield decode_pb2.DecodeGenerateResponse(kv_ready=decode_pb2.KvReady())
        sent: list[float] = []
        position, began = 0, time.monotonic()
        num_tokens = request.sampling.max_tokens
        while position < num_tokens:
            count = await self._due(position, began, num_tokens)
            sent.append(time.monotonic())
            tokens = decode_pb2.DecodeTokens(position=position, token_ids=[_LETTER] * count)
            yield decode_pb2.DecodeGenerateResponse(tokens=tokens)
            position += count
        finished = decode_pb2.DecodeFinished(reason=pb.FINISH_REASON_LENGTH)
        self.sent = sent
        yield decode_pb2.DecodeGenerateResponse(finished=finished)

    async def EndSequence(
        self, _request: decode_pb2.EndSequenceRequest, _context: Any
    ) -> decode_pb2.EndSequenceResponse:
        return decode_pb2.EndSequenceResponse()

    async def HandOver(
        self, _request: decode_pb2.HandOverRequest, _context: Any
    ) -> decode_pb2.HandOverResponse:
        raise NotImplementedError("this worker never drains")

    async def _due(self, position: int, began: float, num_tokens: int) -> int:
        """Waits until the next message may go; how many tokens it has."""
        if self.gather and position:
            await asyncio.sleep(self.gather)
        if not self.interval:
            return 1
        await asyncio.sleep(began + position * self.interval - time.monotonic())
        if not self.gather:
            return 1
        count = int((time.monotonic() - began) / self.interval) + 1 - position
        return min(max(count, 1), num_tokens - position)


class Relay:
    """Passes messages on: deserialized and serialized as a router's are, and not looked at."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._decode = decode_pb2_grpc.DecodeStub(channel)
        self._prefill = prefill_pb2_grpc.PrefillStub(channel)

    async def stream(
        self, request: decode_pb2.DecodeGenerateRequest, _context: Any
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        """One upstream call."""
        call: Any = self._decode.Generate(request)
        while (message := await call.read()) is not grpc.aio.EOF:
            yield message

    async def admit(
        self, request: decode_pb2.DecodeGenerateRequest, _context: Any
    ) -> AsyncIterator[decode_pb2.DecodeGenerateResponse]:
        """Two upstream calls, one after the other; the first message says that both have begun."""
        decode: Any = self._decode.Generate(request)
        admitted = await decode.read()
        prefill = self._prefill.Prefill(
            prefill_pb2.PrefillRequest(token_ids=request.token_ids, lease_id=bytes(16))
        )
        await prefill.read()
        yield admitted
        while await prefill.read() is not grpc.aio.EOF:
            pass
        while (message := await decode.read()) is not grpc.aio.EOF:
            yield message


def _handlers(relay: Relay) -> grpc.GenericRpcHandler:
    def handler(method: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        return grpc.unary_stream_rpc_method_handler(
            method,
            request_deserializer=decode_pb2.DecodeGenerateRequest.FromString,
            response_serializer=decode_pb2.DecodeGenerateResponse.SerializeToString,
        )

    methods = {"Stream": handler(relay.stream), "Admit": handler(relay.admit)}
    return grpc.method_handlers_generic_handler("baton.bench.Relay", methods)


def _record(role: Any, endpoint: str, tokenizer_hash: bytes) -> WorkerRecord:
    return WorkerRecord(
        id=f"{role}-{endpoint}",
        role=role,
        endpoint=endpoint,
        kv_endpoint=endpoint,
        epoch=new_epoch(),
        model=DEFAULT_MODEL,
        fingerprint=b"bench",
        layout=_LAYOUT.SerializeToString(),
        tokenizer_hash=tokenizer_hash,
        kv_dtype="float32",
        block_size=16,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=MAX_MODEL_LEN,
        version=version(),
    )


async def _serve_worker(redis_url: str) -> None:
    worker, server = ScriptedWorker(), Server(ServingSettings.model_validate({}))
    server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, worker)
    server.add(decode_pb2_grpc.add_DecodeServicer_to_server, worker)
    await server.start()
    await server.set_ready(True)
    redis = connect(redis_url)
    tokenizer_hash = read_model_card(locate(DEFAULT_MODEL)).tokenizer_hash
    registrations = [
        Registration(redis, _record(role, server.endpoint, tokenizer_hash))
        for role in ("prefill", "decode")
    ]
    for registration in registrations:
        registration.start()
    await _answer_lines(server.endpoint, worker)
    for registration in registrations:
        await registration.stop()
    await redis.aclose()
    await server.stop(0.0)


async def _serve_relay(endpoint: str) -> None:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_handlers(Relay(channel)),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await _answer_lines(f"127.0.0.1:{port}", None)
        await server.stop(0.0)


async def _answer_lines(endpoint: str, worker: ScriptedWorker | None) -> None:
    print(endpoint, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["pace", seconds] if worker:
                worker.interval = float(seconds)
                print("ok", flush=True)
            case ["gather", seconds] if worker:
                worker.gather = float(seconds)
                print("ok", flush=True)
            case ["sent"] if worker:
                print(json.dumps(worker.sent), flush=True)
            case ["cpu"]:
                print(time.process_time(), flush=True)
            case _:
                raise SystemExit(f"not understood: {line!r}")


if __name__ == "__main__":
    kind, where = sys.argv[1:]
    asyncio.run(_serve_worker(where) if kind == "worker" else _serve_relay(where))
