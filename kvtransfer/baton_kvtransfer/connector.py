"""Connector protocol: one transport of blocks, at one worker and in both directions.

Every transport uses the same Fetch stream: manifest, batches of blocks as they are filled, result.
A connector says what its worker offers to claimants, attaches to another worker's offer, and builds
the batches that its worker sends. All else (leases, order, retries, the fence) is the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, Self

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError
from baton_kvtransfer.stream.block_batch import BlockBatch
from baton_kvtransfer.stream.places import checked_places, places
from baton_kvtransfer.stream.transfer_stream import TransferStream

if TYPE_CHECKING:
    from baton.worker.settings import WorkerSettings  # needs pydantic


class Integrity(Enum):
    """Integrity check of transferred blocks, beside the fence that every handoff has."""

    CHECKSUMS = "checksums"
    FENCE = "fence"
    BY_CONNECTOR = "by connector"

    def of(self, connector: "Connector") -> "Integrity":
        """Returns the check that `connector` makes. Raises `FailedPreconditionError` for `FENCE`
        alone if the connector has no other proof than checksums."""
        if self is Integrity.FENCE and not connector.reads_in_place:
            raise FailedPreconditionError(
                f"connector {connector.name} needs checksums; the fence alone was asked for"
            )
        if self is Integrity.BY_CONNECTOR:
            return Integrity.CHECKSUMS if connector.has_checksums else Integrity.FENCE
        return self


@dataclass(frozen=True, slots=True)
class Region:
    """Memory region of a pool, block 0 first. Each connector sets the fields that it needs.

    Attributes:
        address: address in the source's process or on its device.
        device: number of the CUDA device; None for host memory.
        handle: handle of the device's allocation, and `offset` of the region in it, in bytes.
        device_uuid: UUID of the GPU, 16 bytes.
    """

    address: int = 0
    device: int | None = None
    handle: bytes = b""
    offset: int = 0
    device_uuid: bytes = b""


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer of pools to claimants. Each connector sets the fields that these need to attach.

    Attributes:
        address: name of a socket.
        host: id of the host on which the pools can be read.
        metadata: anything else, at most 1 MiB.
        num_blocks: number of blocks of each pool, not counting block 0.
        regions: memory regions of the pools.
    """

    address: str = ""
    host: str = ""
    metadata: bytes = b""
    num_blocks: tuple[int, ...] = ()
    regions: tuple[Region, ...] = ()


class Receiver(Protocol):
    """Receiver of block batches from one source, until `close`.

    `is_open`: whether the source can still be read.
    """

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None:
        """Releases the source's memory after reads in flight have ended. Idempotent."""

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], integrity: Integrity
    ) -> None:
        """Writes a batch into the blocks `targets` of `pool`, which are as many.

        After a return, error or cancellation nothing writes to them. Raises `DataLossError` for
        blocks that fail their checks, or lack the checksums that `integrity` requires.
        """


class Connector(ABC):
    """Transport of blocks to and from one worker's pools of one content, until `close`.

    Subclasses have defaults for a transport whose claimants read the source's memory: they need
    `name`, `offer` and `attach`.

    Attributes:
        pools: of KV one per cache group, of encoder outputs one.
        sending: CUDA stream of what this worker sends.
        name: as settings, metrics and traces have it.
        reason: reason for the choice of it, once it has attached.
        reads_in_place: the claimant reads the source's memory. The fence proves that the blocks
            kept their content meanwhile.
        has_checksums: blocks have checksums unless a handle asks for the fence alone. False if no
            bit can flip on the way, or the link has checks of its own.
        detects_loss: a read ends by itself if the source is gone.
        is_on_request: an offer holds resources: it is made only for a claimant that asks for it.
        retry_seconds: seconds after which it is tried again with a source to which it could not
            attach for a reason which may pass.
    """

    name: str
    reason: str = "both were given it"
    reads_in_place: bool = True
    has_checksums: bool = True
    detects_loss: bool = False
    is_on_request: bool = False
    retry_seconds: float = 10.0

    def __init__(self, pools: Sequence[KvPool]) -> None:
        self.pools = pools
        self.sending = TransferStream()

    @classmethod
    def for_worker(cls, pools: Sequence[KvPool], _settings: "WorkerSettings") -> Self:
        """Makes the connector of a worker for some of its pools."""
        return cls(pools)

    @classmethod  # noqa: B027 - most check nothing
    async def preflight(cls, settings: "WorkerSettings") -> None:
        """Checks, before a model is loaded, that this host has what `settings` demand. Raises
        `FailedPreconditionError`, with the reason."""

    @property
    def problem(self) -> str:
        """Reason for which this worker can read no other by it; empty if it can."""
        return ""

    @abstractmethod
    async def offer(self) -> Offer:
        """Opens the pools to claimants and returns what these need to attach. Called once the
        model is loaded; if `is_on_request`, maybe several times.

        Raises `UnavailableError`, with the reason, if the pools cannot be opened.
        """

    @abstractmethod
    async def attach(self, offer: Offer) -> Receiver:
        """Returns a receiver that reads the pools which another worker offers into this worker's.
        Raises `UnavailableError`, with the reason, if it cannot; from an `OSError` if the reason
        may pass."""

    def send(
        self,
        group: int,
        first_block: int,
        block_ids: Sequence[int],
        pool: KvPool,
        integrity: Integrity,
    ) -> AsyncGenerator[BlockBatch, None]:
        """Yields batches of the filled blocks `block_ids` of `pool`, in order.

        They may be built before they are requested. So a batch has the blocks' content only if the
        lease still holds when it is yielded, and is valid until the lease is over. The iterator has
        to be closed: no thread reads a block after that.
        """
        if integrity is Integrity.CHECKSUMS:
            return checked_places(self.sending, group, first_block, block_ids, pool)
        return places(group, first_block, block_ids, pool)

    async def close(self) -> None:  # noqa: B027 - not all open something
        """Closes the pools to claimants. Receivers are closed by then."""
