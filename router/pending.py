"""Prompts that workers were given and have not computed yet: prefixes they will soon hold.

A worker computes its prompts in the order in which they came, so a prompt that begins like one
before it finds that beginning cached when its turn comes, though no event has told of it yet. Where
queues are long that is most of what is found again. Knows nothing of workers but their names.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash

_Chain = Sequence[BlockHash]


class PendingPrefixes:
    """Chains of prompts on their way, by worker."""

    def __init__(self) -> None:
        self._by_first: dict[BlockHash, dict[int, tuple[str, _Chain]]] = {}
        self._num_added = 0

    @contextmanager
    def pending(self, worker: str, hashes: _Chain) -> Iterator[None]:
        """A prompt of these blocks is on its way to a worker for the length of the block."""
        if not hashes:
            yield
            return
        self._num_added += 1
        number, first = self._num_added, hashes[0]
        self._by_first.setdefault(first, {})[number] = (worker, hashes)
        try:
            yield
        finally:
            alike = self._by_first[first]
            del alike[number]
            if not alike:
                del self._by_first[first]

    def match(self, hashes: _Chain) -> dict[str, int]:
        """How many of the leading `hashes` each worker is about to hold; others are left out."""
        matches: dict[str, int] = {}
        for worker, chain in self._by_first.get(hashes[0], {}).values() if hashes else ():
            found = matches.get(worker, 0)
            if found < len(hashes):
                matches[worker] = max(found, _num_common(chain, hashes))
        return matches


def held_blocks(index: LocalityIndex, pending: PendingPrefixes, hashes: _Chain) -> dict[str, int]:
    """How many of the leading `hashes` each worker holds, or will when a prompt has its turn."""
    matches = index.match(hashes)
    for worker, num_blocks in pending.match(hashes).items():
        matches[worker] = max(num_blocks, matches.get(worker, 0))
    return matches


def _num_common(one: _Chain, other: _Chain) -> int:
    """Leading blocks that are equal. A block that is equal says that all before it are."""
    places = range(min(len(one), len(other)))
    return bisect_left(places, True, key=lambda i: one[i] != other[i])
