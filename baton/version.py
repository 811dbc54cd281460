"""Version of Baton: shown by every process, and equal on two workers that exchange KV (ADR
0026).
"""

import functools
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from baton.installation import NAME

NOT_INSTALLED = "from its sources"


@functools.cache
def version() -> str:
    """Returns the installed package's version, such as "0.1.0"; `NOT_INSTALLED` if it is not."""
    try:
        return installed(NAME)
    except PackageNotFoundError:
        return NOT_INSTALLED
