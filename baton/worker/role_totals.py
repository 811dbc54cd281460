"""Counter totals of a process since its start, divided by the role that they were counted in."""

from collections.abc import Mapping

from baton.rpc.worker_role import Role

Labels = tuple[str, ...]
Totals = Mapping[str, Mapping[Labels, float]]
"""Counts since the start, by name and by labels without the role."""


class RoleTotals:
    """Counters by role. Call `add` before a role ends, and before they are read."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, Labels], float] = {}
        self._by_role: dict[str, dict[Labels, float]] = {}

    def add(self, role: Role, totals: Totals) -> None:
        """Adds the growth of `totals` since the last call to the counters of `role`."""
        for name, values in totals.items():
            in_roles = self._by_role.setdefault(name, {})
            for labels, total in values.items():
                grown = total - self._counted.get((name, labels), 0)
                self._counted[name, labels] = total
                in_roles[role, *labels] = in_roles.get((role, *labels), 0) + grown

    def of(self, name: str) -> dict[Labels, float]:
        """Returns the values of a counter by role and labels."""
        return self._by_role.get(name, {})
