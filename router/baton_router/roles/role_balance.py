"""Role balance: proposes role changes from the load of both pools over time, with hysteresis.

A pool becomes pressed (overloaded) above the high mark and idle below the low mark, and stays so
until its pressure crosses the middle between the marks. If one pool is pressed and the other idle
for the dwell time, a worker of the idle pool should change its role. The pressed pool keeps at
least half of its pressure, which is not below the low mark; so a change never causes the opposite
one, and under constant load roles converge.

Awaits nothing; the caller passes the time.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton_router.fleet.candidate import Role

_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Snapshot of one worker.

    Attributes:
        pairing: workers exchange blocks only if their pairings are equal.
        is_ready: it takes requests.
        is_draining: it is about to leave or to change its role.
        num_sequences: sequences assigned to it and not finished.
        num_cached_blocks: blocks that it has cached.
    """

    worker: str
    role: Role
    epoch: int
    pairing: bytes = b""
    is_ready: bool = True
    is_draining: bool = False
    num_sequences: int = 0
    num_cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """Proposed role change: the worker, its new role, and its epoch in the present role."""

    worker: str
    role: Role
    epoch: int


@dataclass(frozen=True, slots=True)
class Balance:
    """Last observation of both pools, and the proposal that follows from it.

    Attributes:
        flip: proposed role change; None: none.
        reason: reason for the proposal, or for none, as a sentence.
    """

    prefill_pressure: float
    decode_pressure: float
    flip: Flip | None
    reason: str


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Hysteresis of role changes.

    Attributes:
        high: pressure above which a pool needs another worker.
        low: pressure below which a pool can spare a worker; at most a third of `high`.
        dwell_seconds: seconds for which both conditions must hold.
        cooldown_seconds: seconds between two changes.
    """

    high: float = 0.9
    low: float = 0.3
    dwell_seconds: float = 10.0
    cooldown_seconds: float = 60.0

    def __post_init__(self) -> None:
        assert 0 < 3 * self.low <= self.high, "a change could be a reason for the opposite one"

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class _Pool:
    """Pressure history of one pool."""

    def __init__(self, marks: Hysteresis) -> None:
        self._marks = marks
        self.forget()

    def forget(self) -> None:
        self.is_pressed = self.is_idle = False

    def observe(self, pressure: float) -> None:
        marks = self._marks
        self.is_pressed = pressure > (marks.middle if self.is_pressed else marks.high)
        self.is_idle = pressure < (marks.middle if self.is_idle else marks.low)


class RoleBalance:
    """Role balance of both pools, from repeated observations."""

    def __init__(self, marks: Hysteresis = Hysteresis()) -> None:
        self._marks = marks
        self._pools: dict[Role, _Pool] = {"prefill": _Pool(marks), "decode": _Pool(marks)}
        self._roles: dict[str, Role] = {}
        self._needy: Role | None = None
        self._needy_since = 0.0
        self._looked_at = 0.0
        self._rests_until: float | None = None

    def observe(
        self, workers: Collection[WorkerState], prefill: float, decode: float, now: float
    ) -> Balance:
        """Adds an observation of both pressures. `now`: seconds; must not decrease."""
        self._note_changes(workers, now)
        self._note_pressures(prefill, decode, now)
        flip, reason = self._propose(workers, now)
        return Balance(prefill, decode, flip, reason)

    def rest(self, now: float) -> None:
        """Begins a cooldown without proposals, after a role change was made or has failed."""
        self._rests_until = now + self._marks.cooldown_seconds
        self._needy = None
        for pool in self._pools.values():
            pool.forget()

    def _note_changes(self, workers: Collection[WorkerState], now: float) -> None:
        """Begins a cooldown after any role change, also one that another router made."""
        roles = {one.worker: one.role for one in workers}
        if any(self._roles.get(worker, role) != role for worker, role in roles.items()):
            self.rest(now)
        self._roles = roles

    def _note_pressures(self, prefill: float, decode: float, now: float) -> None:
        self._pools["prefill"].observe(prefill)
        self._pools["decode"].observe(decode)
        needy: Role | None = None
        for role, other in _OTHER.items():
            if self._pools[role].is_pressed and self._pools[other].is_idle:
                needy = role
        was_away = now - self._looked_at > max(1.0, self._marks.dwell_seconds)
        if needy != self._needy or was_away:  # an unobserved time does not count
            self._needy, self._needy_since = needy, now
        self._looked_at = now

    def _propose(self, workers: Collection[WorkerState], now: float) -> tuple[Flip | None, str]:
        marks, needy = self._marks, self._needy
        if needy is None:
            return None, "no pool is pressed while the other one is idle"
        pressed = f"{needy} workers are pressed and {_OTHER[needy]} workers idle"
        if any(one.is_draining for one in workers):
            return None, f"{pressed}; but a worker is draining"
        helpers = self._helpers(workers, needy)
        if not helpers:
            return None, f"{pressed}; but no {_OTHER[needy]} worker can be spared"
        if self._rests_until is not None and now < self._rests_until:
            left = self._rests_until - now
            return None, f"{pressed}; but roles rest for {left:.1f} s after the last change"
        lasted = now - self._needy_since
        if lasted < marks.dwell_seconds:
            return None, f"{pressed} for {lasted:.1f} s; it has to last {marks.dwell_seconds:g} s"
        least = min(helpers, key=_worth)
        reason = (
            f"{pressed} for {lasted:.1f} s, and {least.worker} has least to do and least cached "
            f"among the {_OTHER[needy]} workers"
        )
        return Flip(least.worker, needy, least.epoch), reason

    def _helpers(self, workers: Collection[WorkerState], needy: Role) -> list[WorkerState]:
        """Returns the ready workers of the idle role that are not the last one of their pairing and
        role, and whose pairing has a worker of the needy role."""
        ready = [one for one in workers if one.is_ready]
        helpers = []
        for one in ready:
            roles = [other.role for other in ready if other.pairing == one.pairing]
            if one.role != needy and needy in roles and roles.count(one.role) > 1:
                helpers.append(one)
        return helpers


def _worth(one: WorkerState) -> tuple[int, int, str]:
    return one.num_sequences, one.num_cached_blocks, one.worker
