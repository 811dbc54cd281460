"""Block copies, clears and swaps that precede a step's forward pass. Knows block numbers only."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy of one block from `source` to `target`; a swap has a device and a host block."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class MemoryOperations:
    """Block operations before a step's forward pass, in the order of the fields.

    Attributes:
        copies: the source of each (group, target).
        cleared: each (group, block), in the order of the calls.
    """

    swap_out: list[BlockMove] = field(default_factory=list)
    copies: dict[tuple[int, int], int] = field(default_factory=dict)
    cleared: dict[tuple[int, int], None] = field(default_factory=dict)
    swap_in: list[BlockMove] = field(default_factory=list)

    def copy(self, group: int, source: int, target: int) -> None:
        self.cleared.pop((group, target), None)
        self.copies[group, target] = source

    def clear(self, group: int, block_id: int) -> None:
        """Plans to zero a block, unless it is the target of a copy."""
        if (group, block_id) not in self.copies:
            self.cleared[group, block_id] = None

    def forget(self) -> None:
        """Drops all operations, after they were carried out."""
        self.swap_out.clear()
        self.copies.clear()
        self.cleared.clear()
        self.swap_in.clear()
