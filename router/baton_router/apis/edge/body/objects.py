"""Objects of a schema of request bodies: their fields, and null in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from msgspec import Meta, inspect

_T = TypeVar("_T")
Hint = Annotated[_T, Meta(extra={"is_hint": True})]
"""Field of a schema that changes nothing, and so is named to the client like an unknown one."""


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects of a schema.

    Attributes:
        names: None if unknown ones are an error of the schema itself.
        nested: fields that hold objects, or lists of them.
        variants: by the value of `tag_field`, where there are several kinds of objects.
    """

    names: frozenset[str] | None = None
    nested: Mapping[str, "Objects"] = field(default_factory=dict)
    tag_field: str = ""
    variants: Mapping[Any, "Objects"] = field(default_factory=dict)

    def of(self, value: Mapping[str, Any]) -> "Objects":
        """Returns the kind of one object."""
        if not self.variants:
            return self
        return self.variants.get(value.get(self.tag_field), Objects())


@lru_cache(maxsize=64)
def objects_of(kind: Any) -> Objects | None:
    """Returns the objects that values of this type hold; None if they hold none of a schema."""
    return _objects_in(inspect.type_info(kind))


def without_nulls(value: Any, objects: Objects | None) -> Any:
    """Returns a JSON value whose objects lack the fields that are null, as far as they have a
    schema: within JSON schemas, arguments and metadata null is a value."""
    if objects is None:
        return value
    if isinstance(value, list):
        return [without_nulls(item, objects) for item in value]
    if not isinstance(value, dict):
        return value
    nested = objects.of(value).nested
    return {
        name: without_nulls(item, nested.get(name))
        for name, item in value.items()
        if item is not None
    }


def _objects_in(kind: inspect.Type) -> Objects | None:
    """Returns the objects that a value of this type holds; None if it has none with fields."""
    if isinstance(kind, inspect.Metadata):
        return _objects_in(kind.type)
    if isinstance(kind, inspect.ListType | inspect.VarTupleType):
        return _objects_in(kind.item_type)
    if isinstance(kind, inspect.UnionType):
        kinds = [k.item_type if isinstance(k, inspect.ListType) else k for k in kind.types]
        kinds += [k for union in kinds if isinstance(union, inspect.UnionType) for k in union.types]
        structs = [k for k in kinds if isinstance(k, inspect.StructType)]
        if len(structs) <= 1:
            return _objects_in(structs[0]) if structs else None
        variants = {k.tag: objects for k in structs if (objects := _objects_in(k)) is not None}
        return Objects(tag_field=structs[0].tag_field or "", variants=variants)
    if not isinstance(kind, inspect.StructType):
        return None
    held = {f.encode_name: _objects_in(f.type) for f in kind.fields}
    known = frozenset(f.encode_name for f in kind.fields if not _is_hint(f.type))
    names = None if kind.forbid_unknown_fields else known | {kind.tag_field or ""}
    return Objects(names, {name: inner for name, inner in held.items() if inner is not None})


def _is_hint(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.Metadata) and bool((kind.extra or {}).get("is_hint"))
