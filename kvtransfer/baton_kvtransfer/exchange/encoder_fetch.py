"""Remote encoder fetch: takes outputs of a request's inputs from other workers, if possible."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

from baton.engine.encoder_outputs import ArrivingOutput
from baton.engine.request import EngineRequest
from baton.engine.scheduler.plan import ExternalAllocation
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.models.images.encoder_input import EncoderInput
from baton.v1 import decode_pb2, prefill_pb2
from baton.worker.worker import Worker
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.exchange.exchange import EncoderExchange
from baton_kvtransfer.lease.handle import LEASE_ID_BYTES, Handle
from baton_kvtransfer.transfer_messages import handle_of_source

_FETCH_TIMEOUT = 10.0

logger = logging.getLogger(__name__)

_Request = prefill_pb2.PrefillRequest | decode_pb2.DecodeGenerateRequest


class EncoderFetch:
    """Fetches of encoder outputs by one worker, for the requests that it computes.

    Attributes:
        timeout: seconds after which the input is encoded instead: of a lease that is open, or the
            way to its source. The source itself waits less for a lease that is not
            (`EncoderExchange`).
    """

    def __init__(self, worker: Worker) -> None:
        self.timeout = _FETCH_TIMEOUT
        self._model = worker.model
        self._exchange = worker.component(EncoderExchange)
        self._names = count(1)

    @asynccontextmanager
    async def outputs_of(
        self, request: _Request, wanted: EngineRequest, time_remaining: float | None
    ) -> AsyncIterator[None]:
        """Fetches the outputs of inputs of `wanted` that `request` has sources of, all at once,
        during the `async with` block, in which the request's stream is opened: its sequences
        compute what is before an input meanwhile, and the input itself only after its fetch has
        failed.

        `time_remaining`: seconds of the call; None: it has no deadline.
        """
        timeout = self.timeout if time_remaining is None else min(self.timeout, time_remaining)
        # A fetch has ended before its blocks are given up, however the call ends.
        async with AsyncExitStack() as stack:
            for source, encoder_input in _sources(request, wanted.encoder_inputs):
                name, engine = f"fetch {next(self._names)}", self._model.engine
                arriving = await stack.enter_async_context(AsyncExitStack())
                job = EncodeJob(
                    encoder_input, wanted.priority, wanted.arrival_time, wanted.first_token_deadline
                )
                arrival = await arriving.enter_async_context(engine.arriving(name, job))
                pairing = self._exchange.pairing
                handle = handle_of_source(source, pairing, encoder_input.length, request.tenant)
                fetch = _fetch(arriving, arrival, self._exchange.fetcher, handle, timeout)
                stack.push_async_callback(_end, asyncio.create_task(fetch))
            yield


def _sources(
    request: _Request, inputs: Sequence[EncoderInput]
) -> Iterator[tuple[prefill_pb2.EncoderSource, EncoderInput]]:
    """Yields the usable sources with their inputs, one for each content hash."""
    seen: set[bytes] = set()
    for source in request.encoder_sources:
        if source.input >= len(inputs) or len(source.lease_id) != LEASE_ID_BYTES:
            continue
        wanted = inputs[source.input]
        if wanted.content_hash not in seen:
            seen.add(wanted.content_hash)
            yield source, wanted


async def _fetch(
    arriving: AsyncExitStack,
    arrival: ArrivingOutput,
    fetcher: KvFetcher,
    handle: Handle,
    timeout: float,
) -> None:
    """Fetches one output, once there is room for it; gives it up if that fails."""
    try:
        async with arriving, asyncio.timeout(timeout):
            block_ids = await arrival.block_ids()
            if not block_ids:
                return  # it is in this worker's cache by now
            await fetcher.fetch(handle, ExternalAllocation("", (block_ids,), 0), timeout)
            arrival.commit()
    except Exception as error:
        reason = str(error) or f"it did not come within {timeout:g} s"
        logger.info("no remote encoder fetch from %s: %s", handle.source_worker, reason)


async def _end(fetch: asyncio.Task[None]) -> None:
    """Cancels a fetch and waits for its end."""
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
