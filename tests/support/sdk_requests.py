"""Random request bodies, drawn from the types of the parameters of OpenAI's and Anthropic's SDKs.

Every field that a type requires is there, and two others at most; texts, numbers and keys are from
short lists. Values fit the types, and are no more than that.
"""

import random
import types
from collections.abc import Iterable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import is_typeddict

_TEXTS = ("", "x", "Hello.", "Oslo é 漢", "auto", "get_weather", "call_1", "https://example.org/a")
_NUMBERS = (0, 1, 2, 7, 100, -1)
_FLOATS = (0.0, 0.5, 1.0, 1.5, -1.0)
_MAX_DEPTH = 7


class Drawer:
    """Random values of types."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def of(self, kind: Any, depth: int = 0) -> Any:
        """Returns a value of a type, as JSON has it."""
        origin, arguments = get_origin(kind), get_args(kind)
        if is_typeddict(kind):
            return self._object(kind, depth)
        if origin in (Annotated, Required, NotRequired):
            return self.of(arguments[0], depth)
        if origin is Literal:
            return self._rng.choice(arguments)
        if origin in (Union, types.UnionType):
            return self.of(self._variant(arguments, depth), depth)
        if kind in (None, type(None)):
            return None
        if isinstance(origin or kind, type) and issubclass(origin or kind, Mapping):
            inner = arguments[1] if len(arguments) > 1 else object
            return {self._text(): self.of(inner, depth + 1) for _ in self._few(depth)}
        if kind is str:
            return self._text()
        if kind is bool:
            return self._rng.random() < 0.5
        if kind is int:
            return self._rng.choice(_NUMBERS)
        if kind is float:
            return self._rng.choice(_FLOATS)
        if arguments and isinstance(origin, type) and issubclass(origin, Iterable):
            return [self.of(arguments[0], depth + 1) for _ in self._few(depth)]
        return self._rng.choice((None, "x", 1, [], {}, {"type": "object"}))

    def field(self, kind: Any, name: str) -> Any:
        """Returns a value of one field of an object."""
        return self.of(get_type_hints(kind, include_extras=True)[name], 1)

    def _object(self, kind: Any, depth: int) -> dict[str, Any]:
        hints = get_type_hints(kind, include_extras=True)
        # Annotations that are texts hide from `__required_keys__` which are required.
        needed = {name for name, hint in hints.items() if get_origin(hint) is Required}
        if kind.__total__:
            needed |= {name for name, hint in hints.items() if get_origin(hint) is not NotRequired}
        others = sorted(hints.keys() - needed)
        chosen = self._rng.sample(others, min(len(others), self._rng.randrange(3)))
        return {name: self.of(hints[name], depth + 1) for name in (*sorted(needed), *chosen)}

    def _variant(self, kinds: tuple[Any, ...], depth: int) -> Any:
        """Returns one of a union's types, a simple one far within a value."""
        simple = [kind for kind in kinds if not is_typeddict(kind) and not get_args(kind)]
        return self._rng.choice(simple if simple and depth > _MAX_DEPTH else kinds)

    def _few(self, depth: int) -> range:
        return range(0 if depth > _MAX_DEPTH else self._rng.randrange(4))

    def _text(self) -> str:
        return self._rng.choice(_TEXTS)
