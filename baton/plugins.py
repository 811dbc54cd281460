"""Plug-ins by name: objects that installed packages declare as entry points of a group."""

from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from baton.errors import InvalidArgumentError


def plugin_named(field: str, name: str, built_in: Mapping[str, Any], group: str) -> Any:
    """Returns what Baton or an installed package calls `name`. Raises as `check_plugin`."""
    if name in built_in:
        return built_in[name]
    check_plugin(field, name, built_in, group)
    return _points(group)[name].load()


def check_plugin(field: str, name: str, built_in: Iterable[str], group: str) -> None:
    """Raises `InvalidArgumentError` for the setting `field` if nothing has this name."""
    built_in = list(built_in)
    if name in built_in:
        return  # without the entry points, for which every installed package is read
    points = _points(group)
    if name not in points:
        known = ", ".join([*built_in, *sorted(points.keys() - set(built_in))])
        raise InvalidArgumentError(
            field, f"is {name!r}; must be one of {known}, or be added by a package as {group}"
        )


def _points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
