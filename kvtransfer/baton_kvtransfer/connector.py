"""Connector interface: the transports by which blocks move, and their integrity checks.

Every connector uses the same Fetch stream: manifest, batches of blocks as they are filled, result.
A connector is two objects: a `Sender` at the source, which builds batches of filled blocks, and a
`Receiver` at the claimant, which writes them into its pools.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from baton.engine.executor.cache.kv_pool import KvPool
from baton.errors import FailedPreconditionError
from baton_kvtransfer.stream.block_batch import BlockBatch


@dataclass(frozen=True, slots=True)
class Connector:
    """Transport of blocks.

    Attributes:
        name: as settings, metrics and traces have it.
        reads_in_place: the claimant reads the source's memory. The fence proves that the blocks
            kept their content meanwhile.
        is_local: blocks never cross a network on which bits could flip.
        detects_loss: a read ends by itself if the source is gone.
        is_plugin: an installed package added it.
    """

    name: str
    reads_in_place: bool = True
    is_local: bool = False
    detects_loss: bool = True
    is_plugin: bool = False


# Payload of the stream, over any network.
GRPC = Connector("grpc", reads_in_place=False)
# Reads of the source's memory on the same host, in host memory and on a GPU.
SHM = Connector("shm", is_local=True)
CUDA_IPC = Connector("cuda-ipc", is_local=True)
# One-sided reads of the source's memory, over RDMA or TCP.
NIXL = Connector("nixl", detects_loss=False)


class Integrity(Enum):
    """Integrity check of transferred blocks, beside the fence that every handoff has.

    `BY_CONNECTOR`: checksums if bytes cross a network, none on one host. NIXL between GPUs needs
    none either: their links have their own, and ours would copy each block through the host.
    """

    CHECKSUMS = "checksums"
    FENCE = "fence"
    BY_CONNECTOR = "by connector"

    def of(self, connector: Connector, *, is_on_gpu: bool = False) -> "Integrity":
        """Returns the check that `connector` makes, for pools in host memory or on a GPU.

        Raises `FailedPreconditionError` for `FENCE` alone if the connector needs checksums.
        """
        if self is Integrity.FENCE and not connector.reads_in_place:
            raise FailedPreconditionError(
                f"connector {connector.name} needs checksums; the fence alone was asked for"
            )
        if self is Integrity.BY_CONNECTOR:
            is_linked = connector is NIXL and is_on_gpu
            return Integrity.FENCE if connector.is_local or is_linked else Integrity.CHECKSUMS
        return self


class Sender(Protocol):
    """Builder of block batches at a source."""

    def send(
        self, group: int, first_block: int, block_ids: Sequence[int], pool: KvPool
    ) -> AsyncGenerator[BlockBatch, None]:
        """Yields batches of the filled blocks `block_ids` of `pool`, in order.

        They may be built before they are requested. So a batch has the blocks' content only if the
        lease still holds when it is yielded, and is valid until the lease is over. The iterator has
        to be closed: no thread reads a block after that.
        """


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
