"""Names of fields in errors: the router's paths, in the terms of one HTTP API.

The router's are those of `baton.v1.GenerateRequest`. A field that an API itself refuses has its own
name already, and so has an image, whose path no table matches.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from baton.errors import InvalidArgumentError

Names = Mapping[str, str | Callable[[Any, re.Match[str]], str]]
"""Names by pattern; a function of the request's body and the match where the name depends on the
body's fields."""

InTerms = Callable[[InvalidArgumentError], InvalidArgumentError]
"""Function that returns an error in the terms of the request's API."""


class FieldNames:
    """Table of one API: the first pattern that matches a path's beginning names the field."""

    def __init__(self, names: Names) -> None:
        self._names = [(re.compile(pattern), name) for pattern, name in names.items()]

    def renamed(self, body: Any, error: InvalidArgumentError) -> InvalidArgumentError:
        """Returns the error of the request with this body in the terms of the API."""
        for pattern, name in self._names:
            if match := pattern.match(error.field):
                their_name = match.expand(name) if isinstance(name, str) else name(body, match)
                rest = error.field[match.end() :]
                return error.named(their_name + rest, error.problem.replace("sampling.", ""))
        return error
