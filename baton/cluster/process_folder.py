"""Temporary folder of one process, which later ones remove if the process was killed.

The process holds a lock in it, which the kernel releases at its end, kill -9 included. So a folder
whose lock is free belongs to no process; an id of a process might be another one's meanwhile.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "baton-"
_LOCK = ".lock"


class ProcessFolder:
    """Temporary folder, for the user alone, until `remove`, or until this process ends.

    Args:
        name: part of its name, after "baton-".
        within: folder that it is in; None: the system's for temporary ones.

    Attributes:
        path: the folder.
    """

    def __init__(self, name: str = "", within: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX + name, dir=within)
        self.path = Path(self._folder.name)
        # Renamed after it is locked: a lock that others see was held from the first.
        unnamed = self.path / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Removes it with all that it holds."""
        self._folder.cleanup()
        os.close(self._lock)


def remove_abandoned(within: Path | None = None) -> None:
    """Removes the folders of processes of this user that have ended without removing them.
    `within`: where they are, as of `ProcessFolder`."""
    for folder in (within or Path(tempfile.gettempdir())).glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):  # of another process that removes it, or of another user
            _remove_abandoned(folder)


def _remove_abandoned(folder: Path) -> None:
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # no other process has just removed it
            shutil.rmtree(folder)
    finally:
        os.close(lock)
