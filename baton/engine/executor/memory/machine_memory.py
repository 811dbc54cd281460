"""Memory of this machine, and of the cgroup that this process is in. Knows no torch."""

import os
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allowed_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or the cgroup's limit if less."""
    for path in _LIMITS:
        try:
            limit = Path(path).read_text().strip()
        except OSError:
            continue
        return min(int(limit), machine_memory()) if limit.isdigit() else machine_memory()
    return machine_memory()
