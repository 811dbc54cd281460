"""Remote prefix fetch: takes a prompt's prefix from another worker's cache, if that is possible."""

import logging

from baton.engine.client import SequenceStream
from baton.engine.scheduler.plan import ExternalAllocation
from baton.rpc.cancellation import run_until
from baton.v1 import prefill_pb2 as pb
from baton.worker.pairing import Pairing
from baton_kvtransfer.client import KvFetcher
from baton_kvtransfer.lease.handle import LEASE_ID_BYTES, Handle
from baton_kvtransfer.transfer_messages import handle_of_source

FETCH_TIMEOUT = 10.0

logger = logging.getLogger(__name__)


def source_of(request: pb.PrefillRequest, pairing: Pairing) -> Handle | None:
    """Returns the handle of a prompt's leased prefix, or None if this worker has to compute it."""
    source, block_size = request.source, pairing.layouts[0].block_size
    num_tokens = source.num_blocks * block_size
    is_usable = len(source.lease_id) == LEASE_ID_BYTES and 0 < num_tokens < len(request.token_ids)
    if not is_usable or request.sampling.HasField("prompt_logprobs"):
        return None
    return handle_of_source(source, pairing, num_tokens, request.tenant)


async def fetch_prefix(
    stream: SequenceStream, fetcher: KvFetcher, source: Handle, timeout: float
) -> None:
    """Fetches the blocks of `source`, after which the sequence continues; if that fails or takes
    longer than `timeout` seconds, has the sequence compute them. Raises only an error that ends the
    sequence meanwhile.
    """
    allocation = await stream.allocation()
    if not allocation.block_ids:
        return  # the prefix is in this worker's cache by now
    if await run_until(_fetched(fetcher, source, allocation, timeout), stream.failure()):
        stream.commit_external(None)
    else:
        stream.fail_external()


async def _fetched(
    fetcher: KvFetcher, source: Handle, allocation: ExternalAllocation, timeout: float
) -> bool:
    try:
        _, report = await fetcher.fetch(source, allocation, timeout)
    except Exception as error:
        logger.info("no remote prefix fetch from %s: %s", source.source_worker, error)
        return False
    logger.debug("%d blocks were fetched from %s", report.num_blocks, source.source_worker)
    return True
