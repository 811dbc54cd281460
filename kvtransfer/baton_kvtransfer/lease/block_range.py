"""Block range of a transferred sequence. Source and claimant derive it independently, so that no
list of blocks is sent.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Tokens of one handoff, cut into blocks; the same number in each cache group."""

    num_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    def due(self, window: int | None, num_held: int) -> range:
        """Returns the blocks of a cache group that a claimant needs if it holds the first
        `num_held`. With a sliding `window` (tokens) only the blocks that the last token attends to
        are due: the claimant may compute it again, and later tokens see no further back.
        """
        first = 0 if window is None else max(0, self.num_tokens - window) // self.block_size
        return range(max(first, num_held), self.num_blocks)
