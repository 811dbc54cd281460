"""Classes in order, shares by weight, no tenant starved or paid twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.fairness.fair_queue import FairQueue, Waiting


def drain(queue: FairQueue[int]) -> list[Waiting[int]]:
    taken = []
    while (waiting := queue.pop()) is not None:
        taken.append(waiting)
    return taken


def test_fair_queue_serves_newcomer_within_one_round():
    queue: FairQueue[int] = FairQueue(quantum=1000)
    for i in range(300):
        queue.push(i, tenant="many", num_tokens=1000)
    assert queue.pop() is not None
    queue.push(-1, tenant="one", num_tokens=1000)
    assert -1 in [w.item for w in (queue.pop(), queue.pop()) if w is not None]


def test_fair_queue_shares_tokens_equally_at_any_length():
    """A hundred tokens at a time against ten thousand: half of the tokens each."""
    queue: FairQueue[int] = FairQueue(quantum=512)
    for i in range(1000):
        queue.push(i, tenant="short", num_tokens=100)
    for i in range(10):
        queue.push(i, tenant="long", num_tokens=10_000)
    served: Counter[str] = Counter()
    while sum(served.values()) < 100_000:
        waiting = queue.pop()
        assert waiting is not None
        served[waiting.tenant] += waiting.num_tokens
    assert served["short"] == pytest.approx(served["long"], abs=10_000 + 512)


_SHARES = st.dictionaries(
    st.sampled_from("abcd"), st.floats(0.1, 10.0, allow_nan=False), min_size=2, max_size=4
)


@given(_SHARES, st.lists(st.integers(1, 4000), min_size=4, max_size=4), st.integers(64, 4096))
def test_fair_queue_shares_tokens_by_tenant_weights(weights, sizes, quantum):
    """Between two tenants that both have something waiting, the difference of what they got, each
    by its weight, stays within a turn and a request of either: the bound of the method."""
    queue: FairQueue[int] = FairQueue(weights.__getitem__, quantum)
    size_of = dict(zip(sorted(weights), sizes, strict=False))
    for tenant, size in size_of.items():
        for i in range(60):
            queue.push(i, tenant=tenant, num_tokens=size)
    served = dict.fromkeys(weights, 0)
    left = dict.fromkeys(weights, 60)
    while all(left.values()):
        waiting = queue.pop()
        assert waiting is not None
        served[waiting.tenant] += waiting.num_tokens
        left[waiting.tenant] -= 1
        got = {t: served[t] / weights[t] for t in weights}
        for a in weights:
            for b in weights:
                bound = 2 * quantum + size_of[a] / weights[a] + size_of[b] / weights[b]
                assert abs(got[a] - got[b]) <= bound + 1e-6


def test_fair_queue_serves_put_back_request_next_at_no_cost():
    queue: FairQueue[int] = FairQueue()
    for tenant in "ab":
        for i in range(2):
            queue.push(i, tenant=tenant, num_tokens=700)
    expected = [(w.tenant, w.item) for w in drain(queue)]
    for tenant in "ab":
        for i in range(2):
            queue.push(i, tenant=tenant, num_tokens=700)
    order = []
    for _ in range(4):
        first = queue.pop()
        assert first is not None
        queue.put_back(first)
        again = queue.pop()
        assert again is first
        order.append((again.tenant, again.item))
    assert order == expected


def test_tokens_ahead_are_those_of_earlier_turns():
    queue: FairQueue[int] = FairQueue({"many": 2.0, "few": 1.0}.__getitem__, 100)
    for i in range(50):
        queue.push(i, tenant="many", num_tokens=100)
    queue.push(50, tenant="few", num_tokens=300)
    queue.push(51, tenant="few", priority=-1, num_tokens=20)
    queue.push(52, tenant="few", priority=1, num_tokens=7000)
    assert queue.tokens_ahead("few", 0, 100) == 20 + 300 + 2 * 400
    assert queue.tokens_ahead("many", 0, 100) == 20 + 5000 + 300
    assert queue.tokens_ahead("few", -2, 100) == 0


class Model(RuleBasedStateMachine):
    """Any order of calls: nothing is lost, doubled or invented."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue({"a": 1.0, "b": 3.0, "c": 0.01}.__getitem__, 100)
        self.inside: dict[int, Waiting[int]] = {}
        self.num_pushed = 0
        self.last: Waiting[int] | None = None

    @rule(tenant=st.sampled_from("abc"), priority=st.integers(-1, 1), size=st.integers(0, 10**6))
    def push(self, tenant, priority, size):
        item = self.num_pushed
        self.num_pushed += 1
        self.inside[item] = self.queue.push(item, tenant=tenant, priority=priority, num_tokens=size)

    @rule(barred=st.sampled_from(["", "a", "b", "c"]))
    def pop(self, barred):
        waiting = self.queue.pop(lambda tenant: tenant != barred)
        eligible = [w for w in self.inside.values() if w.tenant != barred]
        assert (waiting is None) == (not eligible)
        self.last = waiting
        if waiting is not None:
            assert waiting.priority == min(w.priority for w in eligible)
            same = [w.item for w in eligible if (w.tenant, w.priority) == _line_of(waiting)]
            assert waiting.item == min(same), "first come, first served"
            del self.inside[waiting.item]

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def pop_newest(self, data):
        tenant = data.draw(st.sampled_from(sorted({w.tenant for w in self.inside.values()})))
        newest = self.queue.pop_newest(tenant)
        mine = [w for w in self.inside.values() if w.tenant == tenant]
        last_class = max(w.priority for w in mine)
        assert newest.item == max(w.item for w in mine if w.priority == last_class)
        del self.inside[newest.item]
        self.last = None

    @precondition(lambda self: self.last is not None)
    @rule()
    def put_back(self):
        self.queue.put_back(self.last)
        self.inside[self.last.item] = self.last
        self.last = None

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data):
        item = data.draw(st.sampled_from(sorted(self.inside)))
        waiting = self.inside.pop(item)
        self.queue.remove(waiting)
        self.queue.remove(waiting)
        self.last = None

    @invariant()
    def counts_agree(self):
        assert len(self.queue) == len(self.inside)
        assert self.queue.num_tokens == sum(w.num_tokens for w in self.inside.values())


def _line_of(waiting: Waiting[int]) -> tuple[str, int]:
    return waiting.tenant, waiting.priority


TestModel = Model.TestCase
