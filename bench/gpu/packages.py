"""Packages that a cluster needs and a machine for `make gpu` has not, as pip takes them.

    python -m bench.gpu.packages [--full]

prints `NAME==VERSION` of those that are installed here: of an engine in a process of its own, or,
with --full, of a router, workers and Redis.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PRESENT: Final = Path(__file__).parents[2] / "tests" / "kernels" / "gpu_packages.txt"
_ENGINE_PROCESS: Final = ("msgspec", "setproctitle")
_CLUSTER: Final = "baton-serve[local]"


def missing(requirements: tuple[str, ...]) -> list[str]:
    """Returns the names of packages that these requirements need, directly or not, besides those
    of `gpu_packages.txt`."""
    present = {*_PRESENT.read_text().split(), "baton-serve"}
    todo, seen, found = list(map(Requirement, requirements)), set[str](), set[str]()
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if name not in present:
            found.add(name)
        if str(need) not in seen and (name not in present or need.extras or name == "baton-serve"):
            seen.add(str(need))
            todo += _needs(need)
    return sorted(found)


def _needs(requirement: Requirement) -> Iterator[Requirement]:
    """Yields the requirements of one that is installed; none of one that is not."""
    try:
        lines = distribution(requirement.name).requires or ()
    except PackageNotFoundError:
        return
    for need in map(Requirement, lines):
        extras = ("", *requirement.extras)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
            yield need


if __name__ == "__main__":
    names = missing((_CLUSTER,) if "--full" in sys.argv else _ENGINE_PROCESS)
    print("\n".join(f"{name}=={version(name)}" for name in names))
