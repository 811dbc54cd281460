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

    def __init__(self, limits: Hysteresis) -> None:
        self._limits = limits
        self.reset()

    def reset(self) -> None:
        self.is_pressed = self.is_idle = False

    def observe(self, pressure: float) -> None:
        limits = self._limits
        self.is_pressed = pressure > (limits.middle if self.is_pressed else limits.high)
        self.is_idle = pressure < (limits.middle if self.is_idle else limits.low)


class RoleBalance:
    """Role balance of both pools, from repeated observations."""

    def __init__(self, limits: Hysteresis = Hysteresis()) -> None:
        self._limits = limits
        self._pools: dict[Role, _Pool] = {"prefill": _Pool(limits), "decode": _Pool(limits)}
        self._roles: dict[str, Role] = {}
        self._scarce: Role | None = None
        self._scarce_since = 0.0
        self._observed_at = 0.0
        self._cooldown_until: float | None = None

    def observe(
        self, workers: Collection[WorkerState], prefill: float, decode: float, now: float
    ) -> Balance:
        """Adds an observation of both pressures. `now`: seconds; must not decrease."""
        self._note_changes(workers, now)
        self._note_pressures(prefill, decode, now)
        flip, reason = self._propose(workers, now)
        return Balance(prefill, decode, flip, reason)

    def begin_cooldown(self, now: float) -> None:
        """Begins a cooldown without proposals, after a role change was made or has failed."""
        self._cooldown_until = now + self._limits.cooldown_seconds
        self._scarce = None
        for pool in self._pools.values():
            pool.reset()

    def _note_changes(self, workers: Collection[WorkerState], now: float) -> None:
        """Begins a cooldown after any role change, also one that another router made."""
        roles = {one.worker: one.role for one in workers}
        if any(self._roles.get(worker, role) != role for worker, role in roles.items()):
            self.begin_cooldown(now)
        self._roles = roles

    def _note_pressures(self, prefill: float, decode: float, now: float) -> None:
        self._pools["prefill"].observe(prefill)
        self._pools["decode"].observe(decode)
        scarce: Role | None = None
        for role, other in _OTHER.items():
            if self._pools[role].is_pressed and self._pools[other].is_idle:
                scarce = role
        was_unobserved = now - self._observed_at > max(1.0, self._limits.dwell_seconds)
        if scarce != self._scarce or was_unobserved:  # an unobserved time does not count
            self._scarce, self._scarce_since = scarce, now
        self._observed_at = now

    def _propose(self, workers: Collection[WorkerState], now: float) -> tuple[Flip | None, str]:
        limits, scarce = self._limits, self._scarce
        if scarce is None:
            return None, "no pool is pressed while the other one is idle"
        pressed = f"{scarce} workers are pressed and {_OTHER[scarce]} workers idle"
        if any(one.is_draining for one in workers):
            return None, f"{pressed}; but a worker is draining"
        donors = self._donors(workers, scarce)
        if not donors:
            return None, f"{pressed}; but no {_OTHER[scarce]} worker can be spared"
        if self._cooldown_until is not None and now < self._cooldown_until:
            left = self._cooldown_until - now
            return None, f"{pressed}; but roles rest for {left:.1f} s after the last change"
        lasted = now - self._scarce_since
        if lasted < limits.dwell_seconds:
            return None, f"{pressed} for {lasted:.1f} s; it has to last {limits.dwell_seconds:g} s"
        least = min(donors, key=_load_of)
        reason = (
            f"{pressed} for {lasted:.1f} s, and {least.worker} has least to do and least cached "
            f"among the {_OTHER[scarce]} workers"
        )
        return Flip(least.worker, scarce, least.epoch), reason

    def _donors(self, workers: Collection[WorkerState], scarce: Role) -> list[WorkerState]:
        """Returns the ready workers of the idle role that are not the last one of their pairing and
        role, and whose pairing has a worker of the scarce role."""
        ready = [one for one in workers if one.is_ready]
        donors = []
        for one in ready:
            roles = [other.role for other in ready if other.pairing == one.pairing]
            if one.role != scarce and scarce in roles and roles.count(one.role) > 1:
                donors.append(one)
        return donors


def _load_of(one: WorkerState) -> tuple[int, int, str]:
    return one.num_sequences, one.num_cached_blocks, one.worker
