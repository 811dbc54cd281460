"""Settings: one field is one flag, one environment variable and one key of the configuration file.

A package declares its settings as fields of a frozen dataclass, by `setting`, and knows nothing of
pydantic. `baton.settings.groups` makes the settings of a process of them, `baton.settings.loading`
reads these.
"""

from dataclasses import field
from typing import TypeVar

_T = TypeVar("_T")


def setting(default: _T, description: str, *, is_secret: bool = False, **bounds: float | str) -> _T:
    """Returns a field of a frozen dataclass that is a setting.

    Args:
        is_secret: `repr` omits it.
        bounds: those of pydantic's `Field`, such as `ge`, `lt` or `pattern`.
    """
    metadata = {"description": description, "repr": not is_secret, **bounds}
    return field(default=default, repr=not is_secret, metadata=metadata)
