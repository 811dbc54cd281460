"""Host of a worker: the check of connectors that read memory of the same host."""

from pathlib import Path

from baton.errors import UnavailableError


def host_id() -> str:
    """Returns the boot id, which processes that can share memory have in common: one kernel's."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_host(host: str) -> None:
    """Raises `UnavailableError` unless `host` is the id of this one."""
    try:
        own = host_id()
    except OSError as error:  # such as too many open files
        raise UnavailableError(f"the id of this host cannot be read: {error}") from error
    if host != own:
        raise UnavailableError("the other worker is on another host")
