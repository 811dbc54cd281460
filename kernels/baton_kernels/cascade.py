"""Cascade attention: finds prefixes that running sequences share, in their block tables.

On a GPU the kernel attends over a shared prefix once for all its members; that gives the same
partial results as each member's own splits, and `paged_decode` merges them as usual. On a CPU
`baton.engine.attention.torch_attention` does so by torch's operations. Pure, on the host.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from baton_kernels.attention_plan import IntArray, Ranges, SharedPrefix

# Bytes that a GPU reads from its L2 cache, which has the blocks after the first member's read, in
# the time of the additional kernel launch that a shared prefix takes.
_LAUNCH_BYTES: Final = 16 * 2**20


def is_faster(num_members: int, num_tokens: int, members_per_tile: int, token_bytes: int) -> bool:
    """Returns whether attending once over a prefix is faster; depends on shapes alone.

    Args:
        members_per_tile: number of members for which K and V are read together.
        token_bytes: bytes of K and V of a token in one layer.
    """
    num_reads = -(-num_members // members_per_tile)
    return (num_members - num_reads) * num_tokens * token_bytes > _LAUNCH_BYTES


def find_shared(
    ranges: Ranges,
    tables: IntArray,
    block_size: int,
    split_tokens: int,
    members_per_tile: int,
    token_bytes: int,
) -> list[SharedPrefix]:
    """Returns the shared prefixes of decodes that pay, at most one per sequence.

    Args:
        tables: `[num_batch_slots, max_blocks]`. Sequences with the same first block are compared.
    """
    # No sequence shares more than it has computed.
    if int(ranges.starts.sum()) * token_bytes <= _LAUNCH_BYTES:
        return []
    return [
        prefix
        for prefix in shared_prefixes(ranges, tables, block_size, split_tokens)
        if is_faster(len(prefix.members), prefix.num_tokens, members_per_tile, token_bytes)
    ]


def shared_prefixes(
    ranges: Ranges, tables: IntArray, block_size: int, split_tokens: int
) -> Iterator[SharedPrefix]:
    """Yields all shared prefixes of the sequences with one token, whose lengths are multiples of
    `split_tokens`."""
    candidates = ((ranges.starts >= split_tokens) & (ranges.num_queries == 1)).nonzero()[0]
    firsts = tables[ranges.batch_slots[candidates], 0]
    if len(set(firsts.tolist())) == len(firsts):  # faster than to sort, where nothing is shared
        return
    found, counts = np.unique(firsts, return_counts=True)
    for first in found[counts > 1]:
        members = candidates[firsts == first]
        num_blocks = int(ranges.starts[members].min()) // block_size
        rows = tables[ranges.batch_slots[members], :num_blocks]
        differing = np.flatnonzero((rows != rows[0]).any(axis=0))
        common = int(differing[0]) if len(differing) else num_blocks
        num_tokens = common * block_size // split_tokens * split_tokens
        if num_tokens:
            yield SharedPrefix(members, num_tokens)
