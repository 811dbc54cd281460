"""Caches of the user in which a test finds no description of a GGUF file but its own."""

import os
from pathlib import Path

_COMPILED = ("kernels", "ptx")  # once for all tests


def own_cache(folder: Path) -> Path:
    """Returns a new XDG_CACHE_HOME in `folder`, with the compiled libraries of the present one."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    cache = folder / "cache"
    (cache / "baton").mkdir(parents=True)
    for name in _COMPILED:
        (shared / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        (cache / "baton" / name).symlink_to(shared / name)
    return cache
