"""The user's cache folder, of which each kind of file has a folder of its own."""

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """Returns the folder of a kind of files, which may not be there yet. Raises `RuntimeError` for
    a user without a home, unless XDG_CACHE_HOME names a folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton" / kind
