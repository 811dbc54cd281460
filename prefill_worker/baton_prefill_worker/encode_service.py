"""gRPC service of the encode role: one call per encoder output, which ends with its lease."""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

from opentelemetry.trace import SpanKind

from baton.engine.encoder_outputs import EncodedOutput
from baton.engine.metering.work_meter import WorkDone
from baton.rpc.attempt_id import request_id_of
from baton.serving.logs import name_request
from baton.serving.telemetry.stages import stage
from baton.v1 import encode_pb2 as pb
from baton.v1 import encode_pb2_grpc as pb_grpc
from baton.v1.prefill_pb2 import LeaseReleased
from baton.worker.engine_messages import encode_job, work_done_to_message
from baton.worker.worker import Worker
from baton_kvtransfer.exchange.exchange import EncoderExchange
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.transfer_messages import claim_of


def add_role(worker: Worker) -> None:
    """Adds the encode role to a worker that does not run yet."""
    worker.server.main.add(pb_grpc.add_EncodeServicer_to_server, worker.component(EncodeService))


class EncodeService(pb_grpc.EncodeServicer):
    """Service that computes encoder outputs, or finds them cached, and keeps them under leases."""

    def __init__(self, worker: Worker) -> None:
        self._membership = worker.membership
        self._model = worker.model
        self._leases = worker.component(EncoderExchange).leases
        self._names = count(1)

    async def Encode(  # noqa: N802
        self, request: pb.EncodeRequest, context: Any
    ) -> AsyncIterator[pb.EncodeResponse]:
        name_request(request_id_of(request.request_id))
        claim = claim_of(request)
        model, only_cached = self._model, request.only_cached
        job = encode_job(request, context.time_remaining())
        blocks = BlockRange(job.num_tokens, model.engine.facts.block_size)
        told = {"baton.worker": self._membership.id, "baton.attempt.id": request.request_id}
        # The output is released after the lease has ended, however this call ends.
        async with AsyncExitStack() as held:
            held.enter_context(stage("encode.call", told, kind=SpanKind.SERVER))
            # Before any reason to refuse: else the claimant would wait for the lease.
            with self._leases.open(claim, blocks) as lease:
                engine = model.engine_for(None if only_cached else "encode")
                engine.check.encoder_input(job.encoder_input, has_tensors=not only_cached)
                if not only_cached:
                    yield _admitted()
                name = f"lease {next(self._names)}"
                encoding = engine.encoded(name, job, only_cached=only_cached)
                output = await held.enter_async_context(encoding)
                if only_cached:  # NOT_FOUND would come in its place
                    yield _admitted()
                lease.advance((output.block_ids,), blocks.num_blocks)
                lease.complete(None, lambda: None)
                yield _encoded(output, job.arrival_time, engine.reading.work_done)
                await lease.over()
                yield pb.EncodeResponse(released=LeaseReleased())


def _admitted() -> pb.EncodeResponse:
    return pb.EncodeResponse(admitted=pb.EncodeAdmitted())


def _encoded(output: EncodedOutput, arrival: float, done: WorkDone) -> pb.EncodeResponse:
    message = pb.Encoded(was_cached=output.was_cached, work_done=work_done_to_message(done))
    if not output.was_cached:
        # On Linux calls and steps have the same clock.
        started = output.times.started
        message.queue_time.FromNanoseconds(int(max(0.0, started - arrival) * 1e9))
        message.elapsed.FromNanoseconds(int((time.perf_counter() - started) * 1e9))
    return pb.EncodeResponse(encoded=message)
