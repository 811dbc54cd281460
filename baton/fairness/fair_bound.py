"""Fair bound: at the limit, the holder with the most gives way (max-min fairness). Pure.

A holder below its equal share, the limit over the number of holders, is never refused, whatever the
others do: it is served as if alone. A holder may use all that the others leave.
"""

import heapq


class FairBound:
    """Limit of a resource, and what each holder has of it. O(log n) per operation, amortized.

    The caller owns what is held:

        match bound.victim_for(holder):
            case None: bound.add(holder)
            case holder: refuse it
            case other: end something of the other, `remove` it, then add

    Args:
        limit: the most that all holders have together.

    Attributes:
        total: what all holders have together.
    """

    def __init__(self, limit: float) -> None:
        self.total = 0
        self._limit = limit
        self._held: dict[str, int] = {}
        # Amounts, negative, with their holders; one that has changed since is skipped.
        self._heap: list[tuple[int, str]] = []

    @property
    def largest(self) -> str | None:
        """Holder with the most; None if there is no holder."""
        while self._heap and self._held.get(self._heap[0][1]) != -self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    @property
    def is_exceeded(self) -> bool:
        """Whether the holders have more than the limit: `largest` is then to give way."""
        return self.total > self._limit

    def held_by(self, holder: str) -> int:
        return self._held.get(holder, 0)

    def victim_for(self, holder: str, amount: int = 1) -> str | None:
        """Returns the holder that has to give way before `holder` may have `amount` more: None
        below the limit; `holder` itself if with them it would have no less than any other."""
        if self.total + amount <= self._limit:
            return None
        largest = self.largest
        if largest is None or self.held_by(largest) <= self.held_by(holder) + amount:
            return holder
        return largest

    def add(self, holder: str, amount: int = 1) -> None:
        """Counts `amount` more of the holder, above the limit, too."""
        self._change(holder, amount)

    def remove(self, holder: str, amount: int = 1) -> None:
        """Counts `amount` less of the holder, which has at least that."""
        assert amount <= self.held_by(holder), "more than the holder has"
        self._change(holder, -amount)

    def _change(self, holder: str, amount: int) -> None:
        self.total += amount
        held = self.held_by(holder) + amount
        if not held:
            self._held.pop(holder, None)
            return
        self._held[holder] = held
        heapq.heappush(self._heap, (-held, holder))
        if len(self._heap) > 2 * len(self._held) + 16:
            self._heap = [(-held, holder) for holder, held in self._held.items()]
            heapq.heapify(self._heap)
