"""Bounds of one request: what is counted in its bytes, since a parser makes an object of each
element, at 30 times the bytes of the smallest ones.

Knows no format: the counters of protobuf (`baton.serving.grpc.message_bounds`) and of JSON
(`baton_router.apis.edge.body.structure`) say what an element and a name are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.errors import InvalidArgumentError


class BoundsError(InvalidArgumentError):
    """Request beyond a bound. Its client may still be sending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one request. Each check raises `BoundsError` beyond a bound, with the path of the
    field that is counted.

    Attributes:
        max_elements: elements without a bound of their own: of one field, or of all together.
        max_elements_of: elements of fields that have their own, by name.
        max_items_of: items of one list in a field, by name.
        max_depth: levels of nesting.
        max_bytes: bytes of a text.
        max_bytes_of: bytes of values that have their own, by the field's name.
        of_kind: bounds of requests that have their own, by the name of their kind.
    """

    max_elements: int = 1024
    max_elements_of: Mapping[str, int] = field(default_factory=dict)
    max_items_of: Mapping[str, int] = field(default_factory=dict)
    max_depth: int = 64
    max_bytes: int = 2**20
    max_bytes_of: Mapping[str, int] = field(default_factory=dict)
    of_kind: Mapping[str, "Bounds"] = field(default_factory=dict)

    def check_elements(self, num: int, name: str, path: str, hint: str = "") -> None:
        check_most(num, self.max_elements_of.get(name, self.max_elements), path, "elements", hint)

    def check_items(self, num: int, name: str, hint: str = "") -> None:
        check_most(num, self.max_items_of.get(name, num), name, "items", hint)

    def check_depth(self, depth: int, path: str) -> None:
        if depth > self.max_depth:
            raise BoundsError(
                path, f"is nested too deeply; expected at most {self.max_depth} levels"
            )

    def check_bytes(self, num: int, name: str, path: str) -> None:
        most = self.max_bytes_of.get(name, self.max_bytes)
        if num > most:
            raise BoundsError(path, f"has {num} bytes; at most {most} are taken")


def check_most(num: int, most: int, path: str, what: str, hint: str = "") -> None:
    """Raises `BoundsError` for more than `most`. `hint`: what is counted, and what to do."""
    if num > most:
        raise BoundsError(path, f"has too many {what}; expected at most {most}{hint}")
