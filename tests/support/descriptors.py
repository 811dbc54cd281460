"""Limit of the open files of a running process."""

import itertools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def descriptors_left(pid: int, number: int) -> Iterator[None]:
    """A process may open so many more files."""
    # Without the one that lists them.
    used = {int(file.name) for file in [*Path(f"/proc/{pid}/fd").iterdir()] if file.is_symlink()}
    free = (n for n in itertools.count() if n not in used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = next(itertools.islice(free, number, None))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
