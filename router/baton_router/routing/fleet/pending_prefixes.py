"""Pending prefixes: blocks of prompts that workers have queued and will soon have cached.

A worker computes its prompts first come, first served, so a prompt finds the prefix of an earlier
one cached by the time it is computed, before any KV event reports it. With long queues most prefix
cache hits are of this kind. Encoder outputs are pending likewise, by their content hashes. Knows
workers only by their names.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash

_Chain = Sequence[BlockHash]


class PendingPrefixes:
    """Pending blocks, with the number of each worker's queued prompts that contain them."""

    def __init__(self) -> None:
        self._counts: dict[BlockHash, dict[str, int]] = {}

    @contextmanager
    def pending(self, worker: str, hashes: _Chain) -> Iterator[None]:
        """Counts a prompt with these blocks as pending at `worker` for the `with` block."""
        for block in hashes:
            of_block = self._counts.setdefault(block, {})
            of_block[worker] = of_block.get(worker, 0) + 1
        try:
            yield
        finally:
            for block in hashes:
                self._forget(worker, block)

    def match(self, hashes: _Chain) -> dict[str, int]:
        """Returns the number of leading `hashes` pending at each worker that has any."""
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
    """Returns the number of leading `hashes` that each worker has cached or pending."""
    matches = index.match(hashes)
    for worker, num_blocks in pending.match(hashes).items():
        matches[worker] = max(num_blocks, matches.get(worker, 0))
    return matches


def held_inputs(
    holders: LocalityIndex | PendingPrefixes, contents: _Chain
) -> dict[str, tuple[int, ...]]:
    """Returns the encoder inputs, by index, whose outputs each worker holds by their `contents`."""
    found: dict[str, tuple[int, ...]] = {}
    for index, content in enumerate(contents):
        for worker in holders.match((content,)):
            found[worker] = (*found.get(worker, ()), index)
    return found
