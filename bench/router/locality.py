"""Cost of prefix locality: of knowing which worker holds a prefix, and of choosing by it.

An index of a million blocks, filled from the conversation trace: as many copies of it as that
takes, unlike each other, each request stored on the worker that holds most of its prefix, or on the
next in turn. Looked up, and timed one by one, are prompts of 24 blocks, the trace's mean, all of
which are held: the longest walk. Events are those of one more copy, a batch per request. A set of
hashes per worker is the reference. A router that starts reads as many blocks from Redis alone. The
last rows place the trace on eight workers by each policy.
"""

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash
from baton.rpc.worker_role import Role
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.placement.decision import DEFAULT_RULES, Decision, PlacementInputs
from baton_router.routing.placement.explanation import why
from baton_router.routing.placement.placement import place
from baton_router.routing.placement.policy import POLICY_NAMES
from baton_router.routing.placement.prefix_source import with_sources
from baton_simulator.traces import MOONCAKE_BLOCK_SIZE, TraceRow, read_mooncake, trace_folder
from bench.report import NotPossibleError, Row, medians
from bench.router import warm
from bench.router.replay import chain_of, replay

TRACE = "mooncake_conversation.jsonl"
NUM_REUSABLE_BLOCKS = 105_710
NUM_INDEXED = 1_000_000
NUM_PROMPT_BLOCKS = 24
NUM_LOOKUPS = 5_000
NUM_BATCHES = 2_000
SIZES = (8, 64)
NUM_CANDIDATES = 100
NUM_PLACEMENTS = 1_000
NUM_REPLAYED_WORKERS = 8
TOKENS_PER_SECOND = 5_000.0  # of one worker in the replay, which keeps it two thirds busy
ROLES: tuple[Role, ...] = ("prefill", "decode")
LOOKUP_AIM = 20.0  # microseconds
PLACEMENT_AIM = 300.0

_COMPARED = (("lookup p50", "us"), ("stored", "us / block"), ("removed", "us / block"))

Chain = tuple[BlockHash, ...]


def run(repeats: int) -> list[Row]:
    """Lookup, events and memory at each number of workers; placement; and the policies."""
    path = trace_folder() / TRACE
    if not path.exists():
        raise NotPossibleError(f"the trace {TRACE} is not there; BATON_TRACES names its folder")
    rows = list(read_mooncake(path))
    return [
        *(row for size in SIZES for row in _index_rows(rows, size, repeats)),
        *warm.rows(repeats),
        *_placement_rows(repeats),
        *_policy_rows(rows),
    ]


def _index_rows(rows: Sequence[TraceRow], num_workers: int, repeats: int) -> list[Row]:
    load = _Load(rows, num_workers)
    figures: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, value in load.measure().items():
            figures.setdefault(name, []).append(value)
    found, case = medians(figures), f"{num_workers} workers"
    return [
        _against_aim(f"{case}: lookup p99", found["lookup p99"], LOOKUP_AIM),
        *(
            _against_sets(f"{case}: {name}", found[name], unit, found[f"sets {name}"])
            for name, unit in _COMPARED
        ),
        _against_sets(f"{case}: memory", load.index_bytes, "bytes / block", load.sets_bytes),
    ]


@dataclass(slots=True)
class _Sets:
    """The plainest index there is."""

    held: dict[str, set[BlockHash]] = field(default_factory=dict)

    def apply(self, worker: str, _epoch: int, events: KvEvents) -> None:
        held = self.held.setdefault(worker, set())
        held.difference_update(events.removed)
        held.update(events.stored)

    def match(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        matches = {}
        for worker, held in self.held.items():
            count = next((i for i, block in enumerate(hashes) if block not in held), len(hashes))
            if count:
                matches[worker] = count
        return matches


class _Load:
    """A full index, and a set per worker with the same in them, and what is asked of both.

    Attributes:
        index_bytes: what a block takes in the index, its hash included.
        sets_bytes: the same of the sets.
    """

    def __init__(self, rows: Sequence[TraceRow], num_workers: int) -> None:
        names = [f"worker-{i}" for i in range(num_workers)]
        entries = list(_entries(rows, names))
        self._index, self._sets = LocalityIndex(2 * NUM_INDEXED), _Sets()
        self.index_bytes = _fill(self._index, entries)
        self.sets_bytes = _fill(self._sets, entries)
        source = random.Random(0)
        long = [entry for entry in entries if len(entry.row.block_ids or ()) >= NUM_PROMPT_BLOCKS]
        self._prompts = [
            entry.hashes[:NUM_PROMPT_BLOCKS] for entry in source.choices(long, k=NUM_LOOKUPS)
        ]
        unseen = entries[-1].copy + 1
        self._batches = [
            (source.choice(names), chain_of(row, unseen))
            for row in source.sample(rows, NUM_BATCHES)
        ]

    def measure(self) -> dict[str, float]:
        """Microseconds of everything, once. Leaves the indices as they were."""
        figures: dict[str, float] = {}
        assert all(self._index.match(p) == self._sets.match(p) for p in self._prompts[:100])
        for prefix, index in (("", self._index), ("sets ", self._sets)):
            figures |= {f"{prefix}{name}": value for name, value in self._lookups(index).items()}
            figures[f"{prefix}stored"] = self._events(index, stored=True)
            figures[f"{prefix}removed"] = self._events(index, stored=False)
        return figures

    def _lookups(self, index: "LocalityIndex | _Sets") -> dict[str, float]:
        return _percentiles("lookup", [_timed(index.match, prompt) for prompt in self._prompts])

    def _events(self, index: "LocalityIndex | _Sets", *, stored: bool) -> float:
        num_blocks = sum(len(hashes) for _, hashes in self._batches)
        batches = [
            (worker, KvEvents(stored=hashes) if stored else KvEvents(removed=hashes))
            for worker, hashes in self._batches
        ]
        start = time.thread_time()
        for worker, events in batches:
            index.apply(worker, 1, events)
        return (time.thread_time() - start) / num_blocks * 1e6


@dataclass(frozen=True, slots=True)
class _Entry:
    """Workers that hold a request of a copy of the trace."""

    worker: str
    row: TraceRow
    copy: int

    @property
    def hashes(self) -> Chain:
        return chain_of(self.row, self.copy)


def _entries(rows: Sequence[TraceRow], names: Sequence[str]) -> Iterator[_Entry]:
    """Stores copies of the trace until there are enough blocks. All requests of a copy share their
    first block, so that this block alone decides no placement."""
    index = LocalityIndex(2 * NUM_INDEXED)
    for number in count():
        row, copy = rows[number % len(rows)], number // len(rows)
        hashes = chain_of(row, copy)
        matches = {w: n for w, n in index.match(hashes).items() if n > 1}
        worker = max(matches, key=matches.__getitem__, default=names[number % len(names)])
        index.apply(worker, 1, KvEvents(stored=hashes))
        yield _Entry(worker, row, copy)
        if len(index) >= NUM_INDEXED:
            return


def _fill(index: "LocalityIndex | _Sets", entries: Sequence[_Entry]) -> float:
    """Stores all of it; returns the bytes that a block takes."""
    seen: set[tuple[int, int]] = set()
    for entry in entries:
        seen.update((entry.copy, block_id) for block_id in entry.row.block_ids or ())
    tracemalloc.start()
    for entry in entries:
        index.apply(entry.worker, 1, KvEvents(stored=entry.hashes))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return num_bytes / len(seen)


def _placement_rows(repeats: int) -> list[Row]:
    """Choosing of 50 prefill and 50 decode workers, each with something cached and something to
    do. Whole decisions also find sources of prefixes and decode workers that might serve alone; a
    request that is traced has its decision explained."""
    source = random.Random(0)
    candidates = [
        Candidate(
            f"{role}-{i}",
            role,
            b"pairing",
            num_cached_tokens=MOONCAKE_BLOCK_SIZE * source.randrange(NUM_PROMPT_BLOCKS),
            num_queued_tokens=source.randrange(20_000),
            num_recent_tokens=source.random() * 1e6,
            num_sequences=source.randrange(64),
        )
        for role in ROLES
        for i in range(NUM_CANDIDATES // 2)
    ]
    num_tokens = MOONCAKE_BLOCK_SIZE * NUM_PROMPT_BLOCKS

    def decide(request_id: str) -> Decision:
        given = tuple(with_sources(candidates))
        return DEFAULT_RULES.decision(PlacementInputs(request_id, num_tokens, given))

    figures: list[dict[str, float]] = []
    for _ in range(repeats):
        ids = list(map(str, range(NUM_PLACEMENTS)))
        decisions = [decide(request_id) for request_id in ids[:100]]
        figures.append(
            _percentiles("placement", [_timed(place, i, num_tokens, candidates) for i in ids])
            | _percentiles("whole decision", [_timed(decide, i) for i in ids])
            | _percentiles("explanation", [_timed(why, one) for one in decisions])
        )
    return [
        _against_aim(
            f"{NUM_CANDIDATES} candidates: {name}",
            statistics.median(f[name] for f in figures),
            PLACEMENT_AIM,
        )
        for name in figures[0]
    ]


def _policy_rows(rows: Sequence[TraceRow]) -> list[Row]:
    """Returns each policy's share of reusable blocks, and its load balance: mean by maximum."""
    found = []
    for policy in POLICY_NAMES:
        replayed = replay(rows, policy, NUM_REPLAYED_WORKERS, TOKENS_PER_SECOND)
        kept = replayed.num_reused_blocks / NUM_REUSABLE_BLOCKS
        is_default = policy == POLICY_NAMES[0]
        case = f"{NUM_REPLAYED_WORKERS} workers, {policy}"
        found += [
            Row(
                f"{case}: kept of what is reusable",
                replayed.num_reused_blocks,
                "blocks",
                "unbounded caches",
                NUM_REUSABLE_BLOCKS,
                kept,
                0.99 if is_default else None,
            ),
            Row(
                f"{case}: computed by the busiest",
                max(replayed.num_computed_blocks),
                "blocks",
                "the mean",
                statistics.mean(replayed.num_computed_blocks),
                1 / replayed.imbalance,
                1 / 1.05 if is_default else None,
            ),
        ]
    return found


def _timed(function: Callable[..., object], *arguments: object) -> float:
    """Microseconds of one call, of this thread alone: a percentile of such short times would
    otherwise be what else the machine does."""
    start = time.thread_time_ns()
    function(*arguments)
    return (time.thread_time_ns() - start) / 1e3


def _percentiles(name: str, times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {f"{name} p50": cuts[49], f"{name} p99": cuts[98]}


def _against_aim(case: str, value: float, aim: float) -> Row:
    return Row(case, value, "us", "the aim", aim, aim / value, 1.0)


def _against_sets(case: str, value: float, unit: str, sets: float) -> Row:
    return Row(case, value, unit, "a set per worker", sets, sets / value, None)
