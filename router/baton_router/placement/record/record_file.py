"""A file of lines that is bounded: a full one makes room for a new one, and the oldest goes.

Knows nothing of what the lines say. Blocks on the disk, so it belongs in a thread.
"""

import contextlib
import os
from itertools import pairwise
from pathlib import Path


class RecordFile:
    """`path` is written to; `path.1` is the file before it, and so on.

    Args:
        max_bytes: of each file.
        num_files: at most, the current one among them.
    """

    def __init__(self, path: Path, max_bytes: int, num_files: int) -> None:
        assert num_files > 0
        self._path = path
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._descriptor: int | None = None
        self._num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def has_room(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._max_bytes

    def begin(self) -> None:
        """Starts a new file; what was in `path` is kept beside it. Raises `OSError`."""
        self.close()
        self._shift()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._num_bytes = 0

    def append(self, line: bytes) -> None:
        """Writes a line. After an `OSError`, of which the line's beginning may be left, nothing
        more can be written to this file."""
        assert self._descriptor is not None, "no file was begun"
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self.close()
            raise
        self._num_bytes += len(line)

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _shift(self) -> None:
        """Each file takes the name of the one before it. What is empty is not kept."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        names = [self._path, *(Path(f"{self._path}.{i}") for i in range(1, self._num_files))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)
