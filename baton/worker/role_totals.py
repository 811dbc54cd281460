"""Totals that a process has counted since its start, told by the role in which they came about."""

from collections.abc import Mapping

from baton.cluster.registry import Role

Labels = tuple[str, ...]
Totals = Mapping[str, Mapping[Labels, float]]
"""Counts since the start, by name and by labels, the role not among them."""


class RoleTotals:
    """Counters by role. Must be settled before a role ends, and before they are read."""

    def __init__(self) -> None:
        self._settled: dict[tuple[str, Labels], float] = {}
        self._by_role: dict[str, dict[Labels, float]] = {}

    def settle(self, role: Role, totals: Totals) -> None:
        """What has come since the last time has come in this role."""
        for name, values in totals.items():
            in_roles = self._by_role.setdefault(name, {})
            for labels, total in values.items():
                grown = total - self._settled.get((name, labels), 0)
                self._settled[name, labels] = total
                in_roles[role, *labels] = in_roles.get((role, *labels), 0) + grown

    def of(self, name: str) -> dict[Labels, float]:
        """By role and labels."""
        return self._by_role.get(name, {})
