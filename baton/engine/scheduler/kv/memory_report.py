"""Block usage report: sharing and internal fragmentation of the KV cache."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Block usage of all groups.

    Attributes:
        num_logical_blocks: entries of all block tables.
        num_physical_blocks: blocks held; fewer if sequences share.
        num_saved_blocks: the difference.
        num_wasted_slots: token slots of the tables' last blocks that hold no token yet.
    """

    num_logical_blocks: int
    num_physical_blocks: int
    num_saved_blocks: int
    num_wasted_slots: int


def report_memory(
    groups: SequenceOf[CacheGroup], sequences: Iterable[Sequence], block_size: int
) -> MemoryReport:
    """Returns the report over `sequences`, which must be all that hold blocks."""
    logical = wasted = 0
    for sequence in sequences:
        held = [sum(b != NULL_BLOCK for b in ids) for ids in sequence.block_ids]
        logical += sum(held)
        covered = len(sequence.block_ids[0]) * block_size if sequence.block_ids else 0
        wasted += max(0, covered - sequence.num_computed_tokens) * sum(map(bool, held))
    physical = sum(group.pool.num_held_blocks for group in groups)
    return MemoryReport(logical, physical, logical - physical, wasted)
