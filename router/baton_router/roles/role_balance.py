"""Role balance: proposes role changes from the load of both pools over time, with hysteresis.

A pool is pressed once its pressure is above the high mark, and idle once it is below the low one;
either stays so until the pressure crosses the middle between them. Where one has been pressed for a
while and the other idle all along, a worker of the idle one should help. That leaves the pressed
pool half of its pressure at least, which is no less than the low mark; so one change is never a
reason for the opposite one, and under a load that stays roles come to rest.

Awaits nothing, and is told the time.
"""

from collections.abc import Collection
from dataclasses import dataclass

from baton_router.fleet.candidate import Role

_OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class WorkerState:
    """One worker at this moment.

    Attributes:
        pairing: workers hand blocks to each other only if theirs is equal.
        is_ready: it takes work.
        is_draining: it is about to leave, or to change its role.
        num_sequences: sequences it was given and has not finished.
        num_cached_blocks: blocks it has cached.
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
    """A worker that is to have this role, and the epoch in which it has the other one."""

    worker: str
    role: Role
    epoch: int


@dataclass(frozen=True, slots=True)
class Balance:
    """Last observation of both pools, and the proposal that follows from it.

    Attributes:
        flip: None: nothing.
        reason: why that is proposed, or why nothing is, as a sentence for people.
    """

    prefill_pressure: float
    decode_pressure: float
    flip: Flip | None
    reason: str


@dataclass(frozen=True, slots=True)
class Hysteresis:
    """Hysteresis of role changes.

    Attributes:
        high: a pressure above it is too much.
        low: one below it leaves a worker to spare; a third of `high` at most.
        dwell_seconds: for so long both must last.
        cooldown_seconds: between two changes.
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
    """Looks at both pools again and again."""

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
        """Takes in both pressures of this moment. `now`: seconds; never goes back."""
        self._note_changes(workers, now)
        self._note_pressures(prefill, decode, now)
        flip, reason = self._propose(workers, now)
        return Balance(prefill, decode, flip, reason)

    def rest(self, now: float) -> None:
        """A change was made, or has failed: there is none until the cool-down is over."""
        self._rests_until = now + self._marks.cooldown_seconds
        self._needy = None
        for pool in self._pools.values():
            pool.forget()

    def _note_changes(self, workers: Collection[WorkerState], now: float) -> None:
        """Rests after any change of a role, whoever has made it."""
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
        if needy != self._needy or was_away:  # of what nobody looked at nothing is known
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
        """Those that leave another one of their role behind, and find one of the other to share the
        work of."""
        ready = [one for one in workers if one.is_ready]
        helpers = []
        for one in ready:
            roles = [other.role for other in ready if other.pairing == one.pairing]
            if one.role != needy and needy in roles and roles.count(one.role) > 1:
                helpers.append(one)
        return helpers


def _worth(one: WorkerState) -> tuple[int, int, str]:
    return one.num_sequences, one.num_cached_blocks, one.worker
