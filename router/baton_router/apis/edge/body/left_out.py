"""Items and blocks of histories that are left out of a request, and named like its unknown fields.

Other servers run tools of their own, and write into a conversation what is for them alone. A client
that changes its model sends that, too. A schema lists in `left_out` where it may be, and its types.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_router.apis.edge.body.unknown_fields import Unknown


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Objects of a body that are left out.

    Attributes:
        path: names of lists, the outermost first, of which the last one has the objects.
        types: values of their field `type`.
    """

    path: Sequence[str]
    types: frozenset[str]

    def applied(self, content: dict[str, Any], found: list[Unknown]) -> dict[str, Any]:
        """Returns a body with None in the places of these objects, so that the index of each stays
        that of the request, and adds their types to `found`, each once."""
        named: dict[str, Unknown] = {}
        kept = self._within(content, 0, "", "", named)
        found += named.values()
        return kept

    def _within(
        self, content: dict[str, Any], depth: int, path: str, place: str, named: dict[str, Unknown]
    ) -> dict[str, Any]:
        name = self.path[depth]
        items = content.get(name)
        if not isinstance(items, list):
            return content
        path, place = f"{path}{name}", f"{place}{name}[]"
        kept = [
            self._kept(item, depth, f"{path}[{at}]", place, named) if type(item) is dict else item
            for at, item in enumerate(items)
        ]
        return {**content, name: kept}

    def _kept(
        self, item: dict[str, Any], depth: int, path: str, place: str, named: dict[str, Unknown]
    ) -> dict[str, Any] | None:
        if depth + 1 < len(self.path):
            return self._within(item, depth + 1, f"{path}.", f"{place}.", named)
        kind = item.get("type")
        if not isinstance(kind, str) or kind not in self.types:
            return item
        unknown = Unknown(f"{path}.{kind}", f"{place}.{kind}", kind, item, frozenset())
        named.setdefault(unknown.place, unknown)
        return None
