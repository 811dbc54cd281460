"""The ways in which blocks move, and what each of them has to offer. The seam between them.

The stream of a Fetch is the same for all: what will come, runs of blocks as they are filled, the
result. A connector is two objects: a `Sender` beside the source's pools, that makes a run of blocks
that are filled, and a `Receiver` beside the claimant's, that puts them where they belong.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from baton.engine.cache.kv_pool import KvLayout, KvPool
from baton.errors import FailedPreconditionError
from baton_kvtransfer.block_batch import BlockBatch


class Connector(Enum):
    """`GRPC`: in the stream itself, over any network. `SHM`: read from the source's memory, on the
    same host. `CUDA_IPC`: the same for the memory of a GPU. `NIXL`: read from the source's memory
    by whatever the network has for it."""

    GRPC = "grpc"
    SHM = "shm"
    NIXL = "nixl"
    CUDA_IPC = "cuda-ipc"


# The fence proves that what was read lay there all the while.
READS_IN_PLACE = frozenset({Connector.SHM, Connector.NIXL, Connector.CUDA_IPC})
# And these never pass over a wire on which bits could flip.
_LOCAL = frozenset({Connector.SHM, Connector.CUDA_IPC})


class Integrity(Enum):
    """Integrity check of transferred blocks, beside the fence that every handoff has.

    `BY_CONNECTOR`: checksums where bytes cross a wire, none where memory is read in place. Between
    GPUs none either: what links them has its own, and ours would take each block through the host.
    """

    CHECKSUMS = "checksums"
    FENCE = "fence"
    BY_CONNECTOR = "by connector"

    def of(self, connector: Connector, *, is_on_gpu: bool = False) -> "Integrity":
        """What it comes to, for pools in host memory or on a GPU.

        Raises `FailedPreconditionError` for less than the connector needs.
        """
        reads_in_place = connector in READS_IN_PLACE
        if self is Integrity.FENCE and not reads_in_place:
            raise FailedPreconditionError(
                f"connector {connector.value} needs checksums; the fence alone was asked for"
            )
        if self is Integrity.BY_CONNECTOR:
            is_linked = connector is Connector.NIXL and is_on_gpu
            return Integrity.FENCE if connector in _LOCAL or is_linked else Integrity.CHECKSUMS
        return self


class Sender(Protocol):
    """Makes runs of the blocks of one source."""

    def max_blocks(self, layout: KvLayout, num_sent: int) -> int:
        """How many blocks the next run has at most; at least 1.

        `num_sent`: how many have gone, of those of its group that were filled at once.
        """

    async def send(
        self, group: int, first_block: int, block_ids: Sequence[int], pool: KvPool
    ) -> BlockBatch:
        """A run of filled blocks, that lie in `pool` at `block_ids`. Valid until the next one is
        asked for, or the lease is over."""


class Receiver(Protocol):
    """Takes runs from one source, until `close`. `connector` is how.

    `is_open`: whether that is still to be had.
    """

    connector: Connector

    @property
    def is_open(self) -> bool: ...

    def close(self) -> None:
        """Lets go of the source once nothing comes from it any more. Idempotent."""

    async def receive(
        self, run: BlockBatch, pool: KvPool, targets: Sequence[int], integrity: Integrity
    ) -> None:
        """Puts a run's blocks into `pool` at `targets`, of which it has as many.

        When this has returned or raised, cancelled or not, nothing is being written any more.
        Raises `DataLossError` for blocks that are not what they should be, or that cannot be
        checked where they should be.
        """
