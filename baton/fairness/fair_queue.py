"""Weighted fair queue: priority classes in order, tenants by weighted shares of tokens.

Deficit round robin (Shreedhar and Varghese, 1995): tenants of a class take turns, and each turn
adds `quantum` times the tenant's weight, in tokens, to the tenant's deficit; the rest is kept while
the tenant has queued requests. So over time waiting tenants get tokens in proportion to their
weights, however long their requests are, at constant cost per request. Within a tenant: first come,
first served. Awaits nothing; independent of workers.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from baton.fairness.fair_bound import FairBound

# About the length of a prompt, so that a turn admits one or two requests.
QUANTUM_TOKENS = 1024

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiting(Generic[T]):
    """Queued item; the argument of `FairQueue.remove` and `FairQueue.put_back`.

    Attributes:
        num_tokens: tokens that it takes from its tenant's share.
        num_bytes: bytes that are held for it while it is queued.
    """

    item: T
    tenant: str
    priority: int
    num_tokens: int
    num_bytes: int = 0


@dataclass(slots=True)
class _Flow(Generic[T]):
    """Queue of one tenant in one priority class.

    Attributes:
        deficit: tokens that the tenant may still take in this turn.
        has_quantum: whether this turn's share was added to the deficit.
    """

    waiting: deque[Waiting[T]] = field(default_factory=deque)
    deficit: float = 0.0
    has_quantum: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(waiting.num_tokens for waiting in self.waiting)


class FairQueue(Generic[T]):
    """Fair queue of items, by priority class and tenant.

    Args:
        weight_of: returns a tenant's share relative to the others, greater than 0.
        quantum: tokens per turn at weight 1.
        max_waiting: maximum number of queued items, as `victim_for` has it.
        max_bytes: maximum of their bytes, as well.

    Attributes:
        num_tokens: tokens of all queued items.
    """

    def __init__(
        self,
        weight_of: Callable[[str], float] = lambda _: 1.0,
        quantum: int = QUANTUM_TOKENS,
        max_waiting: float = math.inf,
        max_bytes: float = math.inf,
    ) -> None:
        self._weight_of = weight_of
        self._quantum = quantum
        # For each class, its tenants in the order of their turns.
        self._classes: dict[int, dict[str, _Flow[T]]] = {}
        self._bound = FairBound(max_waiting)
        self._bytes = FairBound(max_bytes)
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._bound.total

    @property
    def num_bytes(self) -> int:
        """Bytes of all queued items."""
        return self._bytes.total

    def victim_for(self, tenant: str, num_bytes: int = 0) -> str | None:
        """Returns the tenant whose item gives way to one more of `tenant`, by `FairBound`: None
        while there is room, `tenant` itself if the item is to be refused."""
        victim = self._bound.victim_for(tenant)
        return self._bytes.victim_for(tenant, num_bytes) if victim is None else victim

    def push(
        self, item: T, *, tenant: str, priority: int = 0, num_tokens: int, num_bytes: int = 0
    ) -> Waiting[T]:
        """Adds an item at the end of its tenant's queue. Smaller priorities are served first."""
        waiting = Waiting(item, tenant, priority, num_tokens, num_bytes)
        flows = self._classes.setdefault(priority, {})
        flows.setdefault(tenant, _Flow()).waiting.append(waiting)
        self._count(waiting, 1)
        return waiting

    def tokens_ahead(self, tenant: str, priority: int, num_tokens: int) -> int:
        """Returns about how many tokens are served before an item that is pushed now: all of
        earlier classes, the tenant's own, and of each other tenant as many, by its weight."""
        earlier = [flows for each, flows in self._classes.items() if each < priority]
        ahead = float(sum(flow.num_tokens for flows in earlier for flow in flows.values()))
        flows = self._classes.get(priority, {})
        own = flows[tenant].num_tokens if tenant in flows else 0
        rounds = (own + num_tokens) / self._weight_of(tenant)
        for other, flow in flows.items():
            most = own if other == tenant else rounds * self._weight_of(other)
            ahead += min(flow.num_tokens, most)
        return round(ahead)

    def pop(self, is_admissible: Callable[[str], bool] = lambda _: True) -> Waiting[T] | None:
        """Removes and returns the next item whose tenant `is_admissible`; None if there is none.

        A tenant that may not go now is skipped and keeps its deficit.
        """
        for priority in sorted(self._classes):
            waiting = self._pop_of(self._classes[priority], is_admissible)
            if waiting is not None:
                if not self._classes[priority]:
                    del self._classes[priority]
                self._count(waiting, -1)
                return waiting
        return None

    def pop_newest(self, tenant: str) -> Waiting[T]:
        """Removes and returns the newest item of a tenant that has any, of its last class."""
        priority = max(each for each, flows in self._classes.items() if tenant in flows)
        newest = self._classes[priority][tenant].waiting[-1]
        self.remove(newest)
        return newest

    def put_back(self, waiting: Waiting[T]) -> None:
        """Undoes the `pop` that returned the item: it is again the first of its tenant, and its
        tenant the first of its class."""
        flows = self._classes.setdefault(waiting.priority, {})
        flow = flows.pop(waiting.tenant, None) or _Flow()
        flow.waiting.appendleft(waiting)
        flow.deficit += waiting.num_tokens
        flow.has_quantum = True
        self._classes[waiting.priority] = {waiting.tenant: flow, **flows}
        self._count(waiting, 1)

    def remove(self, waiting: Waiting[T]) -> None:
        """Removes a queued item, for example of a cancelled request; does nothing if it is gone."""
        flow = self._classes.get(waiting.priority, {}).get(waiting.tenant)
        if flow is None or waiting not in flow.waiting:
            return
        flow.waiting.remove(waiting)
        self._count(waiting, -1)
        if not flow.waiting:
            del self._classes[waiting.priority][waiting.tenant]
            if not self._classes[waiting.priority]:
                del self._classes[waiting.priority]

    def _count(self, waiting: Waiting[T], change: int) -> None:
        if change > 0:
            self._bound.add(waiting.tenant)
            self._bytes.add(waiting.tenant, waiting.num_bytes)
        else:
            self._bound.remove(waiting.tenant)
            self._bytes.remove(waiting.tenant, waiting.num_bytes)
        self.num_tokens += change * waiting.num_tokens

    def _pop_of(
        self, flows: dict[str, _Flow[T]], is_admissible: Callable[[str], bool]
    ) -> Waiting[T] | None:
        ready = [tenant for tenant in flows if is_admissible(tenant)]
        if not ready:
            return None
        self._skip_empty_rounds(flows, ready)
        while True:
            for tenant in ready:
                flow = flows[tenant]
                if not flow.has_quantum:
                    flow.deficit += self._quantum * self._weight_of(tenant)
                    flow.has_quantum = True
                if flow.waiting[0].num_tokens <= flow.deficit:
                    return self._take(flows, tenant)
                self._rotate(flows, tenant)

    def _skip_empty_rounds(self, flows: dict[str, _Flow[T]], ready: list[str]) -> None:
        """Adds in one step the shares of all rounds in which no tenant could be served, so that a
        long request of a tenant with a small weight costs no loop."""
        rounds = min(self._rounds_until(flows[tenant], tenant) for tenant in ready)
        for tenant in ready if rounds > 0 else ():
            flows[tenant].deficit += rounds * self._quantum * self._weight_of(tenant)

    def _rounds_until(self, flow: _Flow[T], tenant: str) -> int:
        """Returns the number of whole rounds after which the tenant still cannot be served."""
        quantum = self._quantum * self._weight_of(tenant)
        missing = flow.waiting[0].num_tokens - flow.deficit - (0 if flow.has_quantum else quantum)
        return max(0, int(missing // quantum)) if missing > 0 else 0

    def _take(self, flows: dict[str, _Flow[T]], tenant: str) -> Waiting[T]:
        flow = flows[tenant]
        waiting = flow.waiting.popleft()
        flow.deficit -= waiting.num_tokens
        if not flow.waiting:  # a tenant without queued items keeps no deficit
            del flows[tenant]
        elif flow.waiting[0].num_tokens > flow.deficit:
            self._rotate(flows, tenant)
        return waiting

    def _rotate(self, flows: dict[str, _Flow[T]], tenant: str) -> None:
        flow = flows.pop(tenant)
        flow.has_quantum = False
        flows[tenant] = flow
