"""Cascade attention: finds prefixes that running sequences share, in their block tables.

On a GPU the kernel attends over a shared prefix once for all its members, which gives a partial
result for each of their splits, and `paged_decode` merges them as usual. They are bitwise those of
each member's own splits in deterministic mode alone: otherwise the two tilings sum in another
order. On a CPU `baton.engine.executor.attention.torch_attention` does so by torch's operations.
Pure, on the host.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from baton_kernels.attention.plan import Int64Array, Ranges, SharedPrefix
from baton_kernels.attention.split_rule import IntArray, SplitRule

_NONE: Final[Int64Array] = np.zeros(0, np.int64)
_NOWHERE: Final = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class SharingCost:
    """Cost of attending once over a prefix, and what it saves.

    Attributes:
        members_per_tile: number of members for which K and V are read together.
        token_bytes: bytes of K and V of a token in one layer.
        launch_bytes: bytes that are read again in the time that a shared prefix takes in addition.
    """

    members_per_tile: int
    token_bytes: float
    launch_bytes: int

    def is_faster(self, num_members: Int64Array, num_tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """Returns whether attending once over each prefix is faster; depends on shapes alone."""
        num_reads = -(-num_members // self.members_per_tile)
        return (num_members - num_reads) * num_tokens * self.token_bytes > self.launch_bytes


class SharedPrefixes:
    """Shared prefixes of running sequences that pay, followed from step to step.

    Sequences that begin with the same block and have the same split are a group, and one of them
    leads it. A row of the block table is compared with its leader's, each block once: up to where
    they differ, or to where all of the group have computed. A step compares rows that are new,
    those of groups whose leader is gone, and further blocks of rows that have been equal so far.
    """

    def __init__(
        self, num_batch_slots: int, block_size: int, splits: SplitRule, cost: SharingCost
    ) -> None:
        """
        Args:
            splits: the length of a prefix is a multiple of its members' split.
        """
        self._block_size, self._splits, self._cost = block_size, splits, cost
        # Of the last step: the ranges that may share, and their batch slots; the ranges of groups,
        # one group after the other; where each begins, its size, full blocks of its shortest.
        self._candidates = self._slots = self._members = _NONE
        self._begins = self._sizes = self._shortest = _NONE
        self._found: list[SharedPrefix] = []
        # Of each slot: the rewrites of its row and its split when it was last a candidate, -1 at
        # first; its leader, -1 without a group; how many blocks are compared, and where they first
        # differ.
        self._rewrites = np.full(num_batch_slots, -1)
        self._split_tokens = np.full(num_batch_slots, -1)
        self._leaders = np.full(num_batch_slots, -1)
        self._num_compared = np.zeros(num_batch_slots, np.int64)
        self._first_difference = np.zeros(num_batch_slots, np.int64)

    def find(
        self, ranges: Ranges, table: IntArray, rewrites: Int64Array | None = None
    ) -> list[SharedPrefix]:
        """Returns the prefixes that are attended faster once, at most one per sequence. Those with
        more than one token in the step are left out.

        Args:
            table: `[num_batch_slots, max_blocks]`.
            rewrites: `[num_batch_slots]`, the number of changes of each row other than blocks that
                were appended; None: any row may be another.
        """
        # No sequence shares more than it has computed.
        if int(ranges.starts.sum()) * self._cost.token_bytes <= self._cost.launch_bytes:
            return []
        is_candidate = (ranges.starts >= self._splits.least) & (ranges.num_queries == 1)
        candidates = is_candidate.nonzero()[0]
        slots = ranges.batch_slots[candidates]
        split_tokens = self._splits.split_tokens(ranges.starts[candidates] + 1)
        is_same = rewrites is not None and (
            np.array_equal(candidates, self._candidates)
            and np.array_equal(slots, self._slots)
            and np.array_equal(rewrites[slots], self._rewrites[slots])
            and np.array_equal(split_tokens, self._split_tokens[slots])
        )
        if not is_same:
            self._candidates, self._slots = candidates, slots
            self._group(table[slots, 0], self._note(rewrites, split_tokens))
        if len(self._members):
            lengths = np.minimum.reduceat(ranges.starts[self._members], self._begins)
            shortest = lengths // self._block_size
            if not (is_same and np.array_equal(shortest, self._shortest)):
                self._shortest = shortest
                self._found = list(self._prefixes(ranges.batch_slots[self._members], table))
        return self._found

    def _note(self, rewrites: Int64Array | None, split_tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Notes the rewrites of the candidates' rows and their splits. Returns which are as they
        were when last noted."""
        slots = self._slots
        stays = np.zeros(len(slots), np.bool_)
        if rewrites is not None:
            np.equal(self._rewrites[slots], rewrites[slots], out=stays)
            self._rewrites[slots] = rewrites[slots]
        stays &= self._split_tokens[slots] == split_tokens
        self._split_tokens[slots] = split_tokens
        return stays

    def _group(self, first_blocks: IntArray, stays: npt.NDArray[np.bool_]) -> None:
        """Groups the candidates by their first blocks and their splits."""
        groups = (first_blocks.astype(np.int64) << 32) + self._split_tokens[self._slots]
        order = np.argsort(groups, kind="stable")
        groups = groups[order]
        edges = np.ones(len(order) + 1, np.bool_)  # where a group begins, and the one before ends
        edges[1:-1] = groups[1:] != groups[:-1]
        shares = ~(edges[:-1] & edges[1:])
        order = order[shares]
        self._members = self._candidates[order]
        self._begins = edges[:-1][shares].nonzero()[0]
        self._sizes = edges[1:][shares].nonzero()[0] + 1 - self._begins
        self._found = []
        slots = self._slots[order]
        leaders = np.where(stays[order], self._leaders[slots], -1)
        self._leaders.fill(-1)
        if len(slots):
            self._leaders[slots] = leaders
            self._lead(slots, leaders)

    def _lead(self, slots: Int64Array, leaders: Int64Array) -> None:
        """Gives members that have none, and groups whose leader is gone, a leader to compare with.

        Args:
            leaders: of each member, -1: none; members of one group that have one have the same.
        """
        chosen = np.maximum.reduceat(leaders, self._begins)
        is_gone = (chosen < 0) | (self._leaders[chosen] != chosen)
        chosen[is_gone] = slots[self._begins[is_gone]]
        chosen = np.repeat(chosen, self._sizes)
        new = slots[np.repeat(is_gone, self._sizes) | (leaders != chosen)]
        self._leaders[slots] = chosen
        self._num_compared[new] = 0
        self._first_difference[new] = _NOWHERE

    def _prefixes(self, slots: Int64Array, table: IntArray) -> Iterator[SharedPrefix]:
        """Yields the prefixes of the groups. `slots` are those of their members."""
        common = self._common(slots)
        limits = np.repeat(common, self._sizes)
        is_open = self._num_compared[slots] < limits
        if is_open.any():
            self._compare(slots[is_open], limits[is_open], table)
            common = self._common(slots)
        split_tokens = self._split_tokens[slots[self._begins]]
        num_tokens = common * self._block_size // split_tokens * split_tokens
        for group in self._cost.is_faster(self._sizes, num_tokens).nonzero()[0].tolist():
            begin = self._begins[group]
            members = self._members[begin : begin + self._sizes[group]]
            yield SharedPrefix(members, int(num_tokens[group]))

    def _common(self, slots: Int64Array) -> Int64Array:
        """Returns how many blocks each group shares, by what has been compared."""
        differences = np.minimum.reduceat(self._first_difference[slots], self._begins)
        return np.minimum(self._shortest, differences)

    def _compare(self, slots: Int64Array, limits: Int64Array, table: IntArray) -> None:
        """Compares rows with those of their leaders, up to `limits` blocks of each."""
        begin, end = int(self._num_compared[slots].min()), int(limits.max())
        rows, leaders = table[slots, begin:end], table[self._leaders[slots], begin:end]
        differs = (rows != leaders) & (np.arange(begin, end) < limits[:, None])
        firsts = differs.argmax(axis=1)
        ends = differs[np.arange(len(slots)), firsts]
        self._first_difference[slots[ends]] = begin + firsts[ends]
        self._num_compared[slots] = limits
