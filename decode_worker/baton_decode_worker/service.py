"""gRPC service of the decode role: one call per request."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client.core import Metric

from baton.engine.client import EngineClient, SequenceStream
from baton.engine.request import EngineRequest, KvSource
from baton.errors import DataLossError, InvalidArgumentError
from baton.rpc.attempt_id import request_id_of
from baton.rpc.cancellation import run_until
from baton.serving.grpc.coalescer import Coalescer
from baton.serving.logs import name_request
from baton.serving.telemetry.families import gauge
from baton.v1 import decode_pb2 as pb
from baton.v1 import decode_pb2_grpc as pb_grpc
from baton.worker.engine_messages import PromptScores, engine_request, finish_reason_of
from baton.worker.request_spans import request_spans
from baton.worker.worker import Worker
from baton_decode_worker import decode_messages
from baton_decode_worker.capacity import Capacity, num_blocks_on_arrival
from baton_decode_worker.handover import Migrations
from baton_decode_worker.settings import DecodeSettings
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.exchange.encoder_fetch import EncoderFetch
from baton_kvtransfer.exchange.exchange import KvExchange
from baton_kvtransfer.lease.handle import Handle
from baton_kvtransfer.transfer_messages import claim_of, handle_of

# Seconds for a fetch if the caller sets no deadline.
DEFAULT_TIMEOUT = 600.0


def add_role(worker: Worker) -> None:
    """Adds the decode role to a worker that does not run yet."""
    service = worker.component(DecodeService)
    worker.server.main.add(pb_grpc.add_DecodeServicer_to_server, service)
    worker.server.exposition.add(service)


class DecodeService(pb_grpc.DecodeServicer):
    """Service that decodes sequences whose prompt's KV it fetches, or computes itself."""

    def __init__(self, worker: Worker) -> None:
        """`worker`: its settings have to be `DecodeSettings`."""
        assert isinstance(worker.settings, DecodeSettings)
        self._membership = worker.membership
        self._model = worker.model
        self._exchange = worker.component(KvExchange)
        self._encoder_fetch = worker.component(EncoderFetch)
        self._admit_factor = worker.settings.admit_factor
        self._capacity: Capacity | None = None
        self._migrations = Migrations(
            self._exchange.leases, worker.settings.engine_config().block_size
        )
        worker.model.on_load.append(self._open)
        worker.load_reports.append(lambda: {"num_promised_blocks": self.num_promised_blocks})

    async def _open(self, _stack: AsyncExitStack) -> None:
        num_blocks = self._model.engine.pools[0].num_blocks
        self._capacity = Capacity(int(num_blocks * self._admit_factor))

    @property
    def num_promised_blocks(self) -> int:
        return self._capacity.num_promised if self._capacity else 0

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics, as a collector of `baton.serving.telemetry.exposition`."""
        if self._capacity is not None:
            yield gauge(
                "baton_promised_kv_blocks",
                "KV blocks promised to admitted requests for their arrival.",
                {(self._membership.role,): self._capacity.num_promised},
                ("role",),
            )

    async def Generate(
        self, request: pb.DecodeGenerateRequest, context: Any
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        name_request(request_id_of(request.request_id))
        engine = self._model.engine_for("decode")
        remaining = context.time_remaining()
        handle = handle_of(request.handle) if request.HasField("handle") else None
        source = KvSource.EXTERNAL if handle else KvSource.LOCAL
        hashes = handle.block_hashes if handle else ()
        wanted = engine_request(
            request,
            remaining,
            kv_source=source,
            outputs=decode_messages.outputs(request),
            block_hashes=hashes,
            return_cost=decode_messages.return_cost(request),
        )
        block_size = engine.facts.block_size
        fetcher, capacity = self._exchange.fetcher, self._capacity
        assert capacity is not None, "blocks can be fetched, and nothing promises them"
        if handle is not None:
            _check_covers(handle, wanted, block_size)
            fetcher.check(handle)
        grammar = await engine.compile_grammar(wanted)
        num_given = [len(output) for output in wanted.unfinished]
        num_blocks = num_blocks_on_arrival(len(wanted.token_ids), num_given, block_size)
        async with AsyncExitStack() as held:
            held.enter_context(capacity.promise(num_blocks))
            if handle is None:
                fetching = self._encoder_fetch.outputs_of(request, wanted, remaining)
                await held.enter_async_context(fetching)
            stream = held.enter_context(engine.open(wanted, grammar))
            held.enter_context(request_spans(self._membership.id, wanted, stream))
            yield decode_messages.admitted()
            if handle is not None:
                timeout = DEFAULT_TIMEOUT if remaining is None else remaining
                taking = _take_over(stream, fetcher, handle, wanted, engine, timeout=timeout)
                for response in await taking:
                    yield response
            async for response in self._answer(stream, wanted):
                yield response

    async def HandOver(self, request: pb.HandOverRequest, _context: Any) -> pb.HandOverResponse:
        self._migrations.order(request.request_id, claim_of(request))
        return pb.HandOverResponse()

    async def _answer(
        self, stream: SequenceStream, wanted: EngineRequest
    ) -> AsyncIterator[pb.DecodeGenerateResponse]:
        """Yields tokens and finish reasons of all sequences: streamed, or ranked after all have
        ended. Before them, if the prompt is computed here, `prefill_started` and its scores; in
        place of a finish reason, that the only sequence migrated or was preempted."""
        params, gathered = wanted.params, []
        scores = PromptScores(params)
        is_begun = wanted.kv_source is KvSource.EXTERNAL
        with self._migrations.open(wanted, stream) as migration:
            async for batch in stream.updates(None if params.is_ranked else Coalescer().acquire):
                if not is_begun:
                    done, step = self._model.engine.reading.work_done, stream.first_step
                    assert step is not None, "an update of no step"
                    cached, arrived = batch[0].num_cached_tokens, wanted.arrival_time
                    yield decode_messages.prefill_is_here(cached, arrived, step, done)
                    is_begun = True
                for scored in scores.messages(batch):
                    yield pb.DecodeGenerateResponse(prompt_logprobs=scored)
                if params.is_ranked:
                    gathered += batch
                    continue
                for response in decode_messages.responses(batch, params):
                    yield response
                if migration is not None:
                    drains = self._membership.is_draining
                    async for response in migration.follow(batch[-1], drains=drains):
                        yield response
        if params.is_ranked:
            for response in decode_messages.ranked_responses(gathered, params):
                yield response

    async def EndSequence(
        self, request: pb.EndSequenceRequest, _context: Any
    ) -> pb.EndSequenceResponse:
        self._membership.check_epoch(request.epoch)
        reason = finish_reason_of(request.reason)
        self._model.engine.end_sequence(request.request_id, request.sequence_index, reason)
        return pb.EndSequenceResponse()


async def _take_over(
    stream: SequenceStream,
    fetcher: KvFetcher,
    handle: Handle,
    wanted: EngineRequest,
    engine: EngineClient,
    *,
    timeout: float,
) -> list[pb.DecodeGenerateResponse]:
    """Fetches the KV and commits it, so that the scheduler runs the sequences. Returns responses
    for the router. Raises `DataLossError` for a missing or invalid first token."""
    allocation = await stream.allocation()
    fetching = fetcher.fetch(handle, allocation, timeout)
    token, report = await run_until(fetching, stream.failure())
    ready = decode_messages.kv_ready(report, allocation.num_hit_blocks, engine.reading.work_done)
    if wanted.params.num_sequences > 1:
        stream.commit_external(None)
        return [ready]
    if token is None:
        raise DataLossError("the transfer brought no token to go on with")
    vocab_size = engine.facts.info.vocab_size
    if token.token_id >= vocab_size:
        raise DataLossError(f"the transfer brought token {token.token_id} of {vocab_size}")
    stream.commit_external(token.token_id, token.logprob)
    # Sent again in case the source failed before the router got its token.
    return [ready, decode_messages.first_token(token, wanted.params)]


def _check_covers(handle: Handle, wanted: EngineRequest, block_size: int) -> None:
    num_tokens = len(wanted.token_ids)
    if handle.num_tokens != num_tokens:
        raise InvalidArgumentError(
            "handle.num_tokens",
            f"is {handle.num_tokens}; must be the number of token_ids, {num_tokens}",
        )
    if len(handle.block_hashes) > num_tokens // block_size:
        raise InvalidArgumentError(
            "handle.block_hashes",
            f"has {len(handle.block_hashes)} hashes; must have at most one for each full block, "
            f"{num_tokens // block_size}",
        )
