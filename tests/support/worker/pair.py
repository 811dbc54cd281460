"""One worker of each role in this process, behind their own servers, and a caller in the router's
place."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.engine.core.process.engine_child import EngineChild
from baton.rpc.params import params_to_message
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2, kv_transfer_pb2, prefill_pb2
from baton.v1 import inference_pb2 as pb
from baton.v1.admin_pb2_grpc import AdminStub
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from baton.worker.engine_messages import layouts_to_messages
from baton.worker.process import assemble
from baton.worker.roles import settings_class
from baton.worker.worker import Worker
from baton_decode_worker.service import DecodeService
from baton_kvtransfer.exchange.exchange import KvExchange
from tests.support.waiting import until

TIMEOUT = 30.0


async def rest_of(call: Any) -> list[Any]:
    """The messages of a call that were not read yet."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


@dataclass
class Output:
    """Output of one sequence, from the decode worker's messages."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    reason: int = pb.FINISH_REASON_UNSPECIFIED
    finished: decode_pb2.DecodeFinished | None = None

    def take(self, tokens: decode_pb2.DecodeTokens) -> None:
        assert self.finished is None, "tokens behind the end"
        assert tokens.position == len(self.token_ids), "a position twice, or left out"
        assert self.reason == pb.FINISH_REASON_UNSPECIFIED, "tokens behind the last one"
        self.reason = tokens.finish_reason
        self.token_ids += tokens.token_ids
        self.logprobs += tokens.logprobs
        self.top += [(tuple(m.token_ids), tuple(m.logprobs)) for m in tokens.top_logprobs]


@dataclass
class Answer:
    """Messages of both workers about one request."""

    prefill: list[prefill_pb2.PrefillResponse]
    decode: list[decode_pb2.DecodeGenerateResponse]

    @property
    def kv_ready(self) -> decode_pb2.KvReady:
        (ready,) = (r.kv_ready for r in self.decode if r.HasField("kv_ready"))
        return ready

    @property
    def prefill_result(self) -> prefill_pb2.PrefillResult:
        (result,) = (r.result for r in self.prefill if r.HasField("result"))
        return result

    @property
    def prompt_logprobs(self) -> list[pb.PromptLogprobs]:
        return [r.prompt_logprobs for r in self.prefill if r.HasField("prompt_logprobs")]

    @property
    def outputs(self) -> list[Output]:
        """Returns the output of each sequence, by its index."""
        outputs: dict[int, Output] = {}
        for response in self.decode:
            match response.WhichOneof("event"):
                case "tokens":
                    index = response.tokens.sequence_index
                    outputs.setdefault(index, Output()).take(response.tokens)
                case "finished":
                    output = outputs.setdefault(response.finished.sequence_index, Output())
                    assert output.finished is None, "an end twice"
                    # A stop string is the router's to find: no token is told with it.
                    told = (output.reason, pb.FINISH_REASON_STOP_STRING)
                    assert response.finished.reason in told, "told with the last token"
                    output.finished = response.finished
        assert all(o.finished for o in outputs.values()), "a sequence without an end"
        return [outputs[i] for i in range(len(outputs))]


class Pair:
    """Both workers, started. Plays the router."""

    def __init__(self, prefill: Worker, decode: Worker, stack: AsyncExitStack) -> None:
        self.prefill = prefill
        self.decode = decode
        self._leases = prefill.component(KvExchange).leases
        self._promises = decode.component(DecodeService)
        self._names = itertools.count(1)
        servers = [self.prefill.server.main, self.decode.server.main]
        endpoints = [s.endpoint for s in servers] + [s.admin_endpoint for s in servers]
        channels = [grpc.aio.insecure_channel(endpoint) for endpoint in endpoints]
        for channel in channels:
            stack.push_async_callback(channel.close)
        self.to_prefill: Any = PrefillStub(channels[0])
        self.to_decode: Any = DecodeStub(channels[1])
        self.prefill_admin: Any = AdminStub(channels[2])
        self.decode_admin: Any = AdminStub(channels[3])

    def prefill_request(
        self, prompt: list[int], params: SamplingParams, **fields: Any
    ) -> prefill_pb2.PrefillRequest:
        name = next(self._names)
        several = params.num_sequences > 1
        if several:
            params = SamplingParams(
                max_tokens=params.max_tokens, prompt_logprobs=params.prompt_logprobs
            )
        fields = {
            "request_id": f"r{name}",
            "lease_id": name.to_bytes(16, "big"),
            "token_ids": prompt,
            "num_prompt_tokens": len(prompt),
            "sampling": params_to_message(params),
            "decode_worker": self.decode.membership.id,
            "has_several_sequences": several,
            **fields,
        }
        return prefill_pb2.PrefillRequest(**fields)

    def decode_request(
        self, prompt: list[int], params: SamplingParams, lease_id: bytes | None = None
    ) -> decode_pb2.DecodeGenerateRequest:
        message = decode_pb2.DecodeGenerateRequest(
            request_id=f"r{next(self._names)}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=params_to_message(params),
            handle=None if lease_id is None else self.handle(lease_id, len(prompt)),
        )
        message.sampling.ClearField("prompt_logprobs")
        return message

    def handle(self, lease_id: bytes, num_tokens: int) -> kv_transfer_pb2.KvHandle:
        integrity = kv_transfer_pb2.INTEGRITY_XXH3_64
        return handle_of(self.prefill, lease_id, num_tokens, integrity)

    async def hand_over(self, prompt: list[int], params: SamplingParams) -> Answer:
        """One request through both workers, as the router takes it."""
        to_prefill = self.prefill_request(prompt, params)
        decoding = self.to_decode.Generate(
            self.decode_request(prompt, params, to_prefill.lease_id), timeout=TIMEOUT
        )
        try:
            admitted = await decoding.read()
            prefilling = self.to_prefill.Prefill(to_prefill, timeout=TIMEOUT)
            try:
                answer = Answer(await rest_of(prefilling), [admitted, *await rest_of(decoding)])
            finally:
                prefilling.cancel()
        finally:
            decoding.cancel()
        assert answer.decode[0].HasField("admitted")
        assert answer.prefill[0].HasField("admitted")
        return answer

    async def decode_alone(self, prompt: list[int], params: SamplingParams) -> Answer:
        """One request whose prompt the decode worker computes itself."""
        call = self.to_decode.Generate(self.decode_request(prompt, params), timeout=TIMEOUT)
        return Answer([], [r async for r in call])

    async def nothing_held(self, within: float = 2.0) -> None:
        """Waits until both workers have given everything back, which takes them a step."""
        await until(lambda: not self._num_held(), within=within)

    def _num_held(self) -> int:
        blocks = sum(
            w.model.engine.reading.stats.num_held_blocks for w in (self.prefill, self.decode)
        )
        return blocks + len(self._leases) + self._promises.num_promised_blocks


def handle_of(
    worker: Worker, lease_id: bytes, num_tokens: int, integrity: kv_transfer_pb2.Integrity
) -> kv_transfer_pb2.KvHandle:
    """Returns the handle by which the KV of a prompt is fetched from `worker`."""
    pairing = worker.component(KvExchange).pairing
    return kv_transfer_pb2.KvHandle(
        version=1,
        source_worker=worker.membership.id,
        source_endpoint=worker.server.kv.endpoint,
        source_epoch=worker.membership.epoch,
        lease_id=lease_id,
        baton_version=pairing.version,
        fingerprint=pairing.fingerprint,
        layouts=layouts_to_messages(pairing.layouts),
        num_tokens=num_tokens,
        integrity=integrity,
    )


@asynccontextmanager
async def pair_of(
    model: str,
    *,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    fork: Callable[[], EngineChild | None] = lambda: None,
    **both: Any,
) -> AsyncIterator[Pair]:
    """Both workers on one checkpoint, in float32 on the CPU, which hold nothing in the end.
    Keywords are settings. `fork` returns the process for an engine; None: a thread."""
    common = {**COMMON, "model": model, **both}
    settings = settings_class()
    workers = (
        assemble("prefill", settings(**{**common, **(prefill or {})}), fork()),
        assemble("decode", settings(**{**common, **(decode or {})}), fork()),
    )
    async with AsyncExitStack() as stack:
        await start(stack, *workers)
        pair = Pair(*workers, stack)
        yield pair
        await pair.nothing_held()


COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 96, "max_num_seqs": 8}


async def start(stack: AsyncExitStack, *workers: Worker) -> None:
    """Closing the stack stops them."""
    for worker in workers:
        for server in dict.fromkeys((worker.server.main, worker.server.kv)):
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
        await worker.load(stack)
