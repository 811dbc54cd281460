"""Block range of a sequence that is transferred. Source and claimant derive it alike, so that no
list of blocks travels.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The tokens of one handoff, cut into blocks; as many in each cache group."""

    num_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_size)

    def due(self, window: int | None, num_held: int) -> range:
        """The blocks of one cache group that a claimant needs who holds the leading `num_held`.

        Behind a window that is what the last token sees, since the claimant may compute that token
        once more; whatever follows it sees no further back.
        """
        first = 0 if window is None else max(0, self.num_tokens - window) // self.block_size
        return range(max(first, num_held), self.num_blocks)
