"""Role balance: proposes role changes from the load of all pools over time, with hysteresis.

A pool becomes pressed (overloaded) above the high mark and idle below the low mark, and stays so
until its pressure crosses the middle between the marks. If one pool is pressed and another one idle
for the dwell time, a worker of the idle pool should change its role. The pressed pool keeps at
least half of its pressure, which is not below the low mark; so a change never causes the opposite
one, and under constant load roles converge.

Awaits nothing; the caller passes the time.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import permutations

from baton.rpc.worker_role import ROLES, Role
from baton.settings import setting


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Snapshot of one worker.

    Attributes:
        pairing: workers exchange blocks only if their pairings are equal.
        is_ready: it takes requests.
        is_draining: it is about to leave or to change its role.
        keeps_role: it cannot change its role.
        num_sequences: sequences assigned to it and not finished.
        num_indexed_hashes: KV blocks and encoder outputs that it has cached.
    """

    worker: str
    role: Role
    epoch: int
    pairing: bytes = b""
    is_ready: bool = True
    is_draining: bool = False
    keeps_role: bool = False
    num_sequences: int = 0
    num_indexed_hashes: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """Proposed role change: the worker, its new role, and its epoch in the present role."""

    worker: str
    role: Role
    epoch: int


@dataclass(frozen=True, slots=True)
class Balance:
    """Last observation of all pools, and the proposal that follows from it.

    Attributes:
        pressures: load of each pool as a fraction of its objective.
        flip: proposed role change; None: none.
        reason: reason for the proposal, or for none, as a sentence.
    """

    pressures: Mapping[Role, float]
    flip: Flip | None
    reason: str


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Hysteresis of role changes.

    Attributes:
        high: pressure above which a pool needs another worker.
        low: pressure below which a pool can spare a worker; at most a third of `high`.
    """

    high: float = 0.9
    low: float = 0.3
    dwell_s: float = setting(
        10.0, "Seconds of imbalance between the pools before a role changes.", ge=0
    )
    cooldown_s: float = setting(
        60.0, "Minimum seconds between two changes of roles, of any workers.", ge=0
    )
    min_encode_workers: int = setting(
        1,
        "Encode workers that changes of roles leave. With 0 a pool without images is given up, and "
        "begins again once prefill workers are overloaded with images.",
        ge=0,
    )

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


@dataclass(frozen=True, slots=True)
class _Imbalance:
    """A pressed pool and an idle one, which could give it a worker.

    Attributes:
        donors: workers that the idle pool can spare.
        lasted: seconds since when both conditions hold.
    """

    pressed: Role
    idle: Role
    donors: Collection[WorkerState]
    lasted: float


class RoleBalance:
    """Role balance of all pools, from repeated observations."""

    def __init__(self, limits: Hysteresis = Hysteresis()) -> None:
        self._limits = limits
        self._pools = {role: _Pool(limits) for role in ROLES}
        self._roles: dict[str, Role] = {}
        self._since: dict[tuple[Role, Role], float] = {}  # by pressed and idle pool
        self._observed_at = 0.0
        self._cooldown_until: float | None = None

    def observe(
        self, workers: Collection[WorkerState], pressures: Mapping[Role, float], now: float
    ) -> Balance:
        """Adds an observation of all pressures. `now`: seconds; must not decrease."""
        self._note_changes(workers, now)
        self._note_pressures(workers, pressures, now)
        flip, reason = self._propose(workers, pressures, now)
        return Balance(pressures, flip, reason)

    def begin_cooldown(self, now: float) -> None:
        """Begins a cooldown without proposals, after a role change was made or has failed."""
        self._cooldown_until = now + self._limits.cooldown_s
        self._since.clear()
        for pool in self._pools.values():
            pool.reset()

    def _note_changes(self, workers: Collection[WorkerState], now: float) -> None:
        """Begins a cooldown after any role change, also one that another router made."""
        roles = {one.worker: one.role for one in workers}
        if any(self._roles.get(worker, role) != role for worker, role in roles.items()):
            self.begin_cooldown(now)
        self._roles = roles

    def _note_pressures(
        self, workers: Collection[WorkerState], pressures: Mapping[Role, float], now: float
    ) -> None:
        for role, pool in self._pools.items():
            pool.observe(pressures[role])
        with_workers = {one.role for one in workers}
        if now - self._observed_at > max(1.0, self._limits.dwell_s):
            self._since.clear()  # an unobserved time does not count
        self._since = {
            (pressed, idle): self._since.get((pressed, idle), now)
            for pressed, idle in permutations(ROLES, 2)
            if self._pools[pressed].is_pressed
            and self._pools[idle].is_idle
            and (pressed in with_workers or self._may_begin(pressed))
            and idle in with_workers
        }
        self._observed_at = now

    def _propose(
        self, workers: Collection[WorkerState], pressures: Mapping[Role, float], now: float
    ) -> tuple[Flip | None, str]:
        limits = self._limits
        if not self._since:
            return None, "no pool is pressed while another one is idle"
        found = max(
            (
                _Imbalance(*pair, self._donors(workers, *pair), now - since)
                for pair, since in self._since.items()
            ),
            key=lambda one: (
                bool(one.donors),
                one.lasted >= limits.dwell_s,
                pressures[one.pressed],
                -pressures[one.idle],
            ),
        )
        pressed = f"{found.pressed} workers are pressed and {found.idle} workers idle"
        if any(one.is_draining for one in workers):
            return None, f"{pressed}; but a worker is draining"
        if not found.donors:
            return None, f"{pressed}; but no {found.idle} worker can be spared"
        if self._cooldown_until is not None and now < self._cooldown_until:
            left = self._cooldown_until - now
            return None, f"{pressed}; but roles rest for {left:.1f} s after the last change"
        if found.lasted < limits.dwell_s:
            dwell = f"it has to last {limits.dwell_s:g} s"
            return None, f"{pressed} for {found.lasted:.1f} s; {dwell}"
        least = min(found.donors, key=_load_of)
        reason = (
            f"{pressed} for {found.lasted:.1f} s, and {least.worker} has least to do and least "
            f"cached among the {found.idle} workers"
        )
        return Flip(least.worker, found.pressed, least.epoch), reason

    def _donors(
        self, workers: Collection[WorkerState], pressed: Role, idle: Role
    ) -> list[WorkerState]:
        """Returns the ready workers of the idle role that may change it, are not the last ones of
        their pairing and role, and whose pairing has a worker of the pressed role, or may get its
        first one."""
        ready = [one for one in workers if one.is_ready]
        least = self._limits.min_encode_workers if idle == "encode" else 1
        donors = []
        for one in ready:
            roles = [other.role for other in ready if other.pairing == one.pairing]
            can_join = pressed in roles or self._may_begin(pressed)
            may_leave = not one.keeps_role and roles.count(idle) > least
            if one.role == idle and can_join and may_leave:
                donors.append(one)
        return donors

    def _may_begin(self, role: Role) -> bool:
        """Returns whether a pool without workers may get its first one."""
        return role == "encode" and not self._limits.min_encode_workers


def _load_of(one: WorkerState) -> tuple[int, int, str]:
    return one.num_sequences, one.num_indexed_hashes, one.worker
