"""Handle by which a claimant fetches blocks. Plain data; `wire` converts it to a message."""

from dataclasses import dataclass

from baton.engine.scheduler.plan import TokenLogprobs
from baton.worker.pairing import Pairing
from baton_kvtransfer.connector import Integrity

LEASE_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Handle:
    """Handle with which one worker claims one lease."""

    source_worker: str
    source_endpoint: str
    source_epoch: int
    lease_id: bytes
    pairing: Pairing
    num_tokens: int
    block_hashes: tuple[bytes, ...]
    integrity: Integrity = Integrity.BY_CONNECTOR
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """First token after the transferred blocks, chosen by the source. `logprobs`: if requested."""

    position: int
    token_id: int
    logprobs: TokenLogprobs | None = None

    @property
    def logprob(self) -> float | None:
        return None if self.logprobs is None else self.logprobs.logprob


@dataclass(frozen=True, slots=True)
class TransferReport:
    """Report of one fetch, over all cache groups.

    Attributes:
        exposed_s: seconds from the end of the prefill, as the claimant sees it, to the fence.
        connector: name of the transport of the blocks.
        reason: reason for that transport.
    """

    num_blocks: int
    num_bytes: int
    exposed_s: float
    connector: str
    reason: str
