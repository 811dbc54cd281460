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
        num_physical_blocks: the blocks that these name, each once; fewer if sequences share.
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
    """Returns the report over `sequences`. Blocks that only a lease has pinned are in no table."""
    logical = wasted = 0
    physical: list[set[int]] = [set() for _ in groups]
    for sequence in sequences:
        held = [sum(b != NULL_BLOCK for b in ids) for ids in sequence.block_ids]
        logical += sum(held)
        for found, ids in zip(physical, sequence.block_ids, strict=False):
            found.update(b for b in ids if b != NULL_BLOCK)
        covered = len(sequence.block_ids[0]) * block_size if sequence.block_ids else 0
        wasted += max(0, covered - sequence.num_computed_tokens) * sum(map(bool, held))
    num_physical = sum(map(len, physical))
    return MemoryReport(logical, num_physical, logical - num_physical, wasted)
