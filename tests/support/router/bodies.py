"""Bodies of requests as a route reads them."""

from typing import TypeVar

from msgspec import Struct

from baton_router.apis.edge.body.bodies import parse
from baton_router.apis.edge.body.structure import Structure, bounds_of

_Schema = TypeVar("_Schema", bound=Struct)


def parsed_body(body: bytes, schema: type[_Schema]) -> _Schema:
    """Returns the body, received in one piece and parsed. Raises what `parse` does."""
    structure = Structure(bounds_of(2**17))
    structure.feed(body)
    return parse(body, schema, structure.num_keys, [])
