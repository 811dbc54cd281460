"""Record file of lines with size-based rotation: a full file is renamed, the oldest is deleted.

Independent of the lines' content. Blocks on disk I/O, so it belongs in a thread.
"""

import contextlib
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from baton.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Limits of a record."""

    max_bytes: int = setting(
        64 * 2**20,
        "Maximum bytes of --record; a full file is rotated to FILE.1, FILE.2 and so on.",
        ge=2**16,
    )
    files: int = setting(4, "Maximum files of --record, including the current one.", ge=1)


class RecordFile:
    """Rotating file: lines are appended to `path`; `path.1` is the previous file, and so on."""

    def __init__(self, path: Path, limits: RecordLimits) -> None:
        self._path = path
        self._max_bytes = limits.max_bytes
        self._num_files = limits.files
        self._descriptor: int | None = None
        self._num_bytes = 0

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    def has_room(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._max_bytes

    def begin(self) -> None:
        """Starts a new file after rotating the previous ones. Raises `OSError`."""
        self.close()
        self._shift()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._num_bytes = 0

    def append(self, line: bytes) -> None:
        """Appends a line. Raises `OSError`: the line may then be partly written, and the file is
        closed; continue with `begin`."""
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
        """Renames each file to the next older name. Does not keep an empty current file."""
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        names = [self._path, *(Path(f"{self._path}.{i}") for i in range(1, self._num_files))]
        for newer, older in reversed(list(pairwise(names))):
            if newer.exists():
                newer.replace(older)
