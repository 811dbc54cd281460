"""Digests of a checkpoint's files: SHA-256 of every byte, computed while other work runs.

The hub's cache names a large file by its digest, which is taken from there. Other large files are
read once: the digest is kept in the user's cache folder, under the file's inode and times.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.models.user_cache import user_cache

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOBS = "blobs"  # folder of files in the hub's cache
# Smaller files are read in less time than matters.
_KEPT_FROM_BYTES = 64 * 2**20
_MAX_THREADS = 8


class Digests:
    """Digests of files that are being read."""

    def __init__(self, running: Sequence[Future[bytes]]) -> None:
        self._running = running

    def combined(self) -> bytes:
        """Waits for all and returns 32 bytes that change with any byte of any file, and neither
        with names nor with the order of the files. Raises `OSError` for a file that could not be
        read."""
        every = sorted(digest.result() for digest in self._running)
        return hashlib.sha256(b"".join(every)).digest()


@contextmanager
def digesting(files: Sequence[Path]) -> Iterator[Digests]:
    """Reads the files in threads, in a `with` block. Leaving it waits for files that are being
    read, and for no others."""
    threads = ThreadPoolExecutor(min(_MAX_THREADS, len(files)) or 1, "baton-digest")
    try:
        yield Digests([threads.submit(digest_of, file) for file in files])
    finally:
        threads.shutdown(cancel_futures=True)


def digest_of(file: Path) -> bytes:
    """Returns the SHA-256 of a file, 32 bytes. Raises `OSError`."""
    stored = file.resolve()
    if stored.parent.name == _BLOBS and _SHA256.fullmatch(stored.name):
        return bytes.fromhex(stored.name)
    if (before := stored.stat()).st_size < _KEPT_FROM_BYTES:
        return _read(stored)
    with suppress(OSError, RuntimeError, ValueError):
        return bytes.fromhex((user_cache("digests") / _key(before)).read_text())
    digest = _read(stored)
    if _key(stored.stat()) == _key(before):  # else it has changed meanwhile
        with suppress(OSError, RuntimeError):  # a folder that cannot be written to, or none
            _write(user_cache("digests") / _key(before), digest.hex())
    return digest


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def _key(status: os.stat_result) -> str:
    """Returns a name for a file as it is now. Its change time is set by every write, whatever the
    writer says of its modification time."""
    times = status.st_mtime_ns, status.st_ctime_ns
    identity = status.st_dev, status.st_ino, status.st_size, *times
    return "-".join(f"{number:x}" for number in identity)


def _write(file: Path, text: str) -> None:
    """Writes a file aside and renames it, so that others see all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as aside:
        aside.write(text)
    Path(aside.name).rename(file)
