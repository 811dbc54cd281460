"""Prompts that workers were given and have not computed yet: prefixes they will soon hold.

A worker computes its prompts in the order in which they came, so a prompt that begins like one
before it finds that beginning cached when its turn comes, though no event has told of it yet. Where
queues are long that is most of what is found again. Knows nothing of workers but their names.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash

_Chain = Sequence[BlockHash]


class PendingPrefixes:
    """Blocks of prompts on their way, and how many of a worker's prompts have each."""

    def __init__(self) -> None:
        self._counts: dict[BlockHash, dict[str, int]] = {}

    @contextmanager
    def pending(self, worker: str, hashes: _Chain) -> Iterator[None]:
        """A prompt of these blocks is on its way to a worker for the length of the block."""
        for block in hashes:
            of_block = self._counts.setdefault(block, {})
            of_block[worker] = of_block.get(worker, 0) + 1
        try:
            yield
        finally:
            for block in hashes:
                self._forget(worker, block)

    def match(self, hashes: _Chain) -> dict[str, int]:
        """How many of the leading `hashes` each worker is about to hold; others are left out."""
        matches: dict[str, int] = {}
        going_on = set(self._counts.get(hashes[0], ())) if hashes else set()
        for num_blocks, block in enumerate(hashes):
            here = self._counts.get(block, {}).keys()
            if not going_on <= here:
                matches |= dict.fromkeys(going_on - here, num_blocks)
                going_on &= here
            if not going_on:
                return matches
        return matches | dict.fromkeys(going_on, len(hashes))

    def _forget(self, worker: str, block: BlockHash) -> None:
        of_block = self._counts[block]
        if of_block[worker] > 1:
            of_block[worker] -= 1
        else:
            del of_block[worker]
            if not of_block:
                del self._counts[block]


def held_blocks(index: LocalityIndex, pending: PendingPrefixes, hashes: _Chain) -> dict[str, int]:
    """How many of the leading `hashes` each worker holds, or will when a prompt has its turn."""
    matches = index.match(hashes)
    for worker, num_blocks in pending.match(hashes).items():
        matches[worker] = max(num_blocks, matches.get(worker, 0))
    return matches
