"""Resources of a process that a handoff could leave behind."""

import gc
import os
from pathlib import Path

MARK = "memfd:"


def open_files(pid: int | None = None) -> list[str]:
    """Returns the path that each descriptor of a process leads to."""
    folder = Path(f"/proc/{pid or os.getpid()}/fd")
    found = []
    for entry in folder.iterdir():
        try:
            found.append(str(entry.readlink()))
        except OSError:  # that of this look itself
            continue
    return found


def num_mapped(pid: int | None = None) -> int:
    """Returns how many pools are mapped."""
    gc.collect()
    maps = Path(f"/proc/{pid or os.getpid()}/maps").read_text()
    return sum(MARK in line for line in maps.splitlines())


def abstract_sockets() -> set[str]:
    """The sockets on this host on which pools are offered or asked for."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@baton-kv-" in line}


def shared_files() -> set[Path]:
    """Returns our files, and those of UCX; others on this host have some, too."""
    return {p for p in Path("/dev/shm").iterdir() if "baton" in p.name or "ucx" in p.name}


def orphaned_segments() -> set[str]:
    """Returns segments of System V's shared memory that no process has attached."""
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    attached, number = rows[0].index("nattch"), rows[0].index("shmid")
    return {row[number] for row in rows[1:] if row[attached] == "0"}
