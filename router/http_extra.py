"""Whether the HTTP front is installed: it is an extra, imported only where it is asked for."""

from importlib.util import find_spec

from baton.errors import FailedPreconditionError

_PACKAGES = ("fastapi", "uvicorn")


def check_http_extra() -> None:
    """Raises `FailedPreconditionError`, which says what to install."""
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise FailedPreconditionError(
            f"--http-port needs {' and '.join(missing)}; pip install 'baton-serve[http]'"
        )
