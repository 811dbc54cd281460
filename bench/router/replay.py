"""A trace placed on workers that only exist as what the router knows of them.

Prefill workers whose caches never evict compute prompts one after the other at a given speed; a
single decode worker is always free, so that a policy is seen by its prefill placement alone. The
policy, the selection and the index are the router's own; there is no network but for what workers
lend each other, which takes as long as it is expected to, and no other model of time.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.decayed_counter import DecayedCounter
from baton_router.routing.placement.cost_model import FETCH
from baton_router.routing.placement.placement import place
from baton_router.routing.placement.policy import PolicyName, policy_named
from baton_router.routing.placement.prefix_source import with_sources
from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceRow

_DECODE = Candidate("decode-0", "decode", b"")


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replayed trace.

    Attributes:
        num_reused_blocks: blocks found on the worker that the prompt was placed on.
        num_computed_blocks: the others, by worker.
        num_fetched_blocks: of those that were reused, those fetched from another worker.
        first_tokens: seconds from each arrival to the end of its prefill.
        chosen: which worker each prompt was placed on.
    """

    num_reused_blocks: int
    num_computed_blocks: tuple[int, ...]
    num_fetched_blocks: int
    first_tokens: tuple[float, ...]
    chosen: tuple[str, ...]

    @property
    def imbalance(self) -> float:
        """The most that a worker computed, by the mean."""
        return max(self.num_computed_blocks) / statistics.mean(self.num_computed_blocks)


class _Worker:
    """Counts of one prefill worker, as a router keeps them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_at = 0.0
        self.num_computed_blocks = 0
        self.last_turn = 0
        self.recent = DecayedCounter()

    def candidate(self, num_cached_blocks: int, now: float, tokens_per_second: float) -> Candidate:
        waiting = max(0.0, self.free_at - now)
        return Candidate(
            self.name,
            "prefill",
            b"",
            num_cached_tokens=num_cached_blocks * MOONCAKE_BLOCK_SIZE,
            num_queued_tokens=round(waiting * tokens_per_second),
            num_recent_tokens=self.recent.value(now),
            last_turn=self.last_turn,
        )

    def take(
        self, num_blocks: int, turn: int, now: float, tokens_per_second: float, fetch: float
    ) -> float:
        """Computes so many blocks after fetching for so many seconds; returns when that is
        done."""
        num_tokens = num_blocks * MOONCAKE_BLOCK_SIZE
        self.free_at = max(self.free_at, now) + fetch + num_tokens / tokens_per_second
        self.num_computed_blocks += num_blocks
        self.last_turn = turn
        self.recent.add(num_tokens, now)
        return self.free_at


def replay(
    rows: Iterable[TraceRow],
    policy: PolicyName,
    num_workers: int,
    tokens_per_second: float,
    *,
    fetches: bool = False,
) -> Replayed:
    """Places each request when it arrives; what it computes can be reused from then on.

    Args:
        fetches: workers get what they lack from each other, where the policy finds that worth it.
    """
    index = LocalityIndex()
    workers = {name: _Worker(name) for name in (f"prefill-{i}" for i in range(num_workers))}
    chosen_policy = policy_named(policy)
    num_reused, num_fetched, first_tokens, all_chosen = 0, 0, [], []
    for turn, row in enumerate(rows, 1):
        hashes = chain_of(row)
        matches, now = index.match(hashes), row.arrival
        candidates = [
            worker.candidate(matches.get(worker.name, 0), now, tokens_per_second)
            for worker in workers.values()
        ]
        candidates = with_sources(candidates) if fetches else candidates
        placement = place(
            str(turn), row.num_prompt_tokens, [*candidates, _DECODE], policy=chosen_policy
        )
        assert placement is not None, "no worker is available"
        chosen = workers[placement.prefill]
        num_cached = matches.get(placement.source or chosen.name, 0)
        fetch = placement.chosen[0].terms.get(FETCH, 0.0)
        done = chosen.take(len(hashes) - num_cached, turn, now, tokens_per_second, fetch)
        first_tokens.append(done - now)
        all_chosen.append(chosen.name)
        num_reused += num_cached
        num_fetched += num_cached - matches.get(chosen.name, 0)
        index.apply(chosen.name, 1, KvEvents(stored=hashes))
    computed = tuple(worker.num_computed_blocks for worker in workers.values())
    return Replayed(num_reused, computed, num_fetched, tuple(first_tokens), tuple(all_chosen))


def chain_of(row: TraceRow, copy: int = 0) -> tuple[BlockHash, ...]:
    """Chain hashes that are equal where the row's ids are. Those of another copy of the trace have
    nothing in common with them."""
    ids: Sequence[int] = row.block_ids or ()
    high = copy << 64
    return tuple((high | block_id).to_bytes(16, "big") for block_id in ids)
