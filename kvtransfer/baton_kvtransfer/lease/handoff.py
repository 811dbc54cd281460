"""Handoff state of a claimant: valid events, and blocks that are due in each cache group.

Independent of the transport; writes no block, but returns where a batch belongs or rejects it.
"""

from collections.abc import Sequence

from baton.engine.executor.cache.kv_layout import KvLayout
from baton.engine.scheduler.plan import ExternalAllocation
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import DataLossError
from baton_kvtransfer.lease.block_range import BlockRange
from baton_kvtransfer.lease.handle import FirstToken
from baton_kvtransfer.lease.machine import CLAIMANT, ClaimantEvent, LeaseAction, LeaseState
from baton_kvtransfer.stream.block_batch import BlockBatch


class Handoff:
    """Handoff that follows the table `CLAIMANT`. An event invalid now raises `DataLossError`.

    Attributes:
        generation: generation of the lease, from the manifest; the confirmation must have it.
        num_blocks, num_bytes: blocks and bytes received, over all cache groups.
        first_token: from the result; None if only the blocks were requested.
    """

    def __init__(
        self, num_tokens: int, layouts: Sequence[KvLayout], allocation: ExternalAllocation
    ) -> None:
        self._layouts = layouts
        self._tables = allocation.block_ids
        self._blocks = BlockRange(num_tokens, layouts[0].block_size)
        assert all(len(table) == self._blocks.num_blocks for table in self._tables)
        self._due = [self._blocks.due(x.window, allocation.num_hit_blocks) for x in layouts]
        self.state = LeaseState.CREATED
        self.generation = 0
        self.num_blocks = 0
        self.num_bytes = 0
        self.first_token: FirstToken | None = None

    def request(self) -> None:
        self._apply(ClaimantEvent.REQUESTED)

    def open(self, generation: int, num_blocks: int) -> None:
        """Applies the manifest. Raises `DataLossError` for another number of blocks."""
        if num_blocks != self._blocks.num_blocks:
            raise DataLossError(
                f"the lease has {num_blocks} blocks; {self._blocks.num_blocks} were allocated for "
                "it"
            )
        self._apply(ClaimantEvent.MANIFEST)
        self.generation = generation

    def place(self, run: BlockBatch) -> tuple[int, ...]:
        """Returns the target blocks of a batch, which the receiver writes. Removes them from due.
        Raises `DataLossError` unless the batch begins with the next block due."""
        self._apply(ClaimantEvent.BLOCKS)
        if run.group >= len(self._layouts):
            raise DataLossError(
                f"blocks of group {run.group} arrived; there are {len(self._layouts)}"
            )
        block_bytes, due = self._layouts[run.group].block_bytes, self._due[run.group]
        count = run.count(block_bytes)
        targets = self._tables[run.group][due.start : due.start + count]
        if run.first_block != due.start or count > len(due) or NULL_BLOCK in targets:
            raise DataLossError(
                f"blocks [{run.first_block}, +{count}) of group {run.group} arrived where blocks "
                f"[{due.start}, {due.stop}) were due"
            )
        self._due[run.group] = due[count:]
        self.num_blocks += count
        self.num_bytes += count * block_bytes
        return targets

    def complete(self, first_token: FirstToken | None) -> None:
        """Applies the result. Raises `DataLossError` if blocks are still due."""
        for group, due in enumerate(self._due):
            if due:
                raise DataLossError(
                    f"the transfer ended while blocks [{due.start}, {due.stop}) of group {group} "
                    "were due"
                )
        self._apply(ClaimantEvent.RESULT)
        self.first_token = first_token

    def acknowledge(self) -> FirstToken | None:
        """Applies the source's acknowledgement that it still held all blocks: the content may be
        used. Returns the token that follows it."""
        self._apply(ClaimantEvent.ACKNOWLEDGED)
        self._apply(ClaimantEvent.COMMITTED)
        return self.first_token

    def end(self, event: ClaimantEvent) -> bool:
        """Ends the handoff by `TIMED_OUT` or `BROKEN`. Returns False if it was over already."""
        step = CLAIMANT.get((self.state, event))
        if step is None:
            return False
        assert step.actions == (LeaseAction.DISCARD,), "an ending of another kind"
        self.state = step.state
        return True

    def _apply(self, event: ClaimantEvent) -> None:
        step = CLAIMANT.get((self.state, event))
        if step is None:
            raise DataLossError(
                f"the transfer brought {event.name.lower()} when it was {self.state.name.lower()}"
            )
        self.state = step.state
