"""Memory of this machine, and of the cgroup that this process is in. Knows no torch."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USAGES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
_MACHINE = Path("/proc/meminfo")


def machine_memory() -> int:
    """Returns the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allowed_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or the cgroup's limit if less."""
    limit = _limit()
    return machine_memory() if limit is None else min(limit[0], machine_memory())


def available_memory(machine: Path = _MACHINE, cgroup: Sequence[str | Path] = ()) -> int:
    """Returns the bytes that may still be taken: those that the machine has available, or those
    that are left of the cgroup's limit if less. Cached files, which give way, are not counted as
    taken.

    Args:
        machine: file with the machine's numbers.
        cgroup: files that may have the limit; empty: those of this process.
    """
    available = _numbers(machine).get("MemAvailable:", 0) * 1024 or machine_memory()
    limit = _limit(cgroup)
    if limit is None:
        return available
    most, folder, usage = limit
    try:
        taken = int((folder / usage).read_text())
    except OSError:
        return min(most, available)
    cached = _numbers(folder / "memory.stat").get("inactive_file", 0)
    return max(0, min(most - taken + cached, available))


def return_freed_memory() -> None:
    """Returns to the system what the heap has free, with a C library that can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _limit(files: Sequence[str | Path] = ()) -> tuple[int, Path, str] | None:
    """Returns the limit of the cgroup in bytes, its folder, and the name of the file of its usage;
    None without a limit."""
    for path in map(Path, files or _LIMITS):
        try:
            limit = path.read_text().strip()
        except OSError:
            continue
        return (int(limit), path.parent, _USAGES[path.name]) if limit.isdigit() else None
    return None


def _numbers(file: Path) -> dict[str, int]:
    """Returns the numbers of a file with a name and a number in each line; empty without it."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0]: int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}
