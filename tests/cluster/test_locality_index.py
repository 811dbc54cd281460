from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex

BLOCKS = [bytes([number]) * 16 for number in range(12)]
WORKERS = ["a", "b", "c", "d"]

workers = st.sampled_from(WORKERS)
epochs = st.integers(1, 3)
blocks = st.lists(st.sampled_from(BLOCKS), max_size=8)


def naive_match(held: dict[str, set[bytes]], hashes: list[bytes]) -> dict[str, int]:
    matches = {}
    for worker, holds in held.items():
        count = next((n for n, block in enumerate(hashes) if block not in holds), len(hashes))
        if count:
            matches[worker] = count
    return matches


class IndexAgainstSets(RuleBasedStateMachine):
    """The index says what a set of hashes per worker would say."""

    def __init__(self) -> None:
        super().__init__()
        self.index = LocalityIndex()
        self.epochs: dict[str, int] = {}
        self.held: dict[str, set[bytes]] = {}

    def admits(self, worker: str, epoch: int) -> bool:
        known = self.epochs.get(worker, 0)
        if epoch > known:
            self.epochs[worker], self.held[worker] = epoch, set()
        return epoch >= known

    @rule(worker=workers, epoch=epochs, stored=blocks, removed=blocks, cleared=st.booleans())
    def apply(
        self, worker: str, epoch: int, stored: list[bytes], removed: list[bytes], cleared: bool
    ) -> None:
        self.index.apply(worker, epoch, KvEvents(tuple(stored), tuple(removed), cleared))
        if self.admits(worker, epoch):
            kept = set() if cleared else self.held[worker]
            self.held[worker] = kept.difference(removed).union(stored)

    @rule(worker=workers, epoch=epochs, hashes=blocks)
    def replace(self, worker: str, epoch: int, hashes: list[bytes]) -> None:
        self.index.replace(worker, epoch, hashes)
        if self.admits(worker, epoch):
            self.held[worker] = set(hashes)

    @rule(worker=workers)
    def drop(self, worker: str) -> None:
        self.index.drop(worker)
        self.epochs.pop(worker, None)
        self.held.pop(worker, None)

    @rule(hashes=blocks)
    def match(self, hashes: list[bytes]) -> None:
        assert self.index.match(hashes) == naive_match(self.held, hashes)

    @invariant()
    def counts_agree(self) -> None:
        for worker in WORKERS:
            assert self.index.num_hashes(worker) == len(self.held.get(worker, ()))


TestIndexAgainstSets = IndexAgainstSets.TestCase
TestIndexAgainstSets.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@given(
    st.integers(1, 10),
    st.lists(st.tuples(workers, blocks, blocks), max_size=20),
)
def test_bounded_index_keeps_its_bound_and_invents_no_block(
    max_entries: int, changes: list[tuple[str, list[bytes], list[bytes]]]
) -> None:
    index = LocalityIndex(max_entries)
    held: dict[str, set[bytes]] = {worker: set() for worker in WORKERS}
    for worker, stored, removed in changes:
        index.apply(worker, 1, KvEvents(tuple(stored), tuple(removed)))
        held[worker] = held[worker].difference(removed).union(stored)
        assert len(index) <= max_entries
        for name in WORKERS:
            found = {block for block in BLOCKS if name in index.match([block])}
            assert found <= held[name]
            assert index.num_hashes(name) == len(found)


def test_bounded_index_evicts_the_oldest_entry_first() -> None:
    index = LocalityIndex(max_entries=4)
    for block in BLOCKS[:6]:
        index.apply("a", 1, KvEvents(stored=(block,)))
    assert [bool(index.match([block])) for block in BLOCKS[:6]] == [False, False] + [True] * 4


def test_bounded_index_keeps_recently_matched_blocks() -> None:
    index = LocalityIndex(max_entries=1_000)
    hot = [number.to_bytes(16, "little") for number in range(20)]
    index.apply("a", 1, KvEvents(stored=tuple(hot)))
    for number in range(20, 20_000, 10):
        fresh = [n.to_bytes(16, "little") for n in range(number, number + 10)]
        index.apply("a", 1, KvEvents(stored=tuple(fresh)))
        assert index.match(hot) == {"a": 20}
        assert len(index) <= 1_000
        assert len(index._seen) <= 500
    assert index.match([(20).to_bytes(16, "little")]) == {}
    assert index.num_hashes("a") == len(index)


def test_bounded_index_keeps_its_bound_when_all_is_matched() -> None:
    index = LocalityIndex(max_entries=1_000)
    hashes = [number.to_bytes(16, "little") for number in range(5_000)]
    for start in range(0, 5_000, 100):
        index.apply("a", 1, KvEvents(stored=tuple(hashes[start : start + 100])))
        for block in hashes:
            index.match([block])
        assert len(index) <= 1_000


def test_drop_hides_a_worker_at_once_and_frees_entries_later() -> None:
    index = LocalityIndex()
    hashes = [number.to_bytes(16, "little") for number in range(5_000)]
    index.replace("a", 1, hashes)
    index.drop("a")
    assert (index.match(hashes), index.num_hashes("a")) == ({}, 0)
    for _ in range(10):
        index.apply("b", 1, KvEvents(stored=(hashes[0],)))
    assert (len(index), index.match(hashes)) == (1, {"b": 1})


def test_index_bitmaps_stay_small_when_workers_come_and_go() -> None:
    index = LocalityIndex()
    hashes = [number.to_bytes(16, "little") for number in range(2_000)]
    index.replace("stays", 1, hashes)
    for epoch in range(1, 500):
        index.replace("comes and goes", epoch, hashes[:10])
    assert len(index._by_position) < 20
    assert index.match(hashes[:20]) == {"stays": 20, "comes and goes": 10}


def test_match_is_the_callers_own_when_the_same_is_cached() -> None:
    index = LocalityIndex()
    index.apply("a", 1, KvEvents(stored=tuple(BLOCKS[:2])))
    index.apply("b", 1, KvEvents(stored=(BLOCKS[0],)))
    for _ in range(2):
        match = index.match(BLOCKS[:2])
        assert match == {"a": 2, "b": 1}
        match["a"] = match["c"] = 9
