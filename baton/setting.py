"""Settings as fields of frozen dataclasses, declared once, where they are used.

Flags, environment variables, keys of files, their bounds and their help follow from such a field
(`baton.serving.settings.Group`). Knows nothing of pydantic.
"""

from dataclasses import field
from typing import TypeVar

_T = TypeVar("_T")


def setting(default: _T, description: str, **bounds: float | str) -> _T:
    """Returns a field of a frozen dataclass that is a setting. `bounds`: those of pydantic's
    `Field`, such as `ge`, `lt` or `pattern`."""
    return field(default=default, metadata={"description": description, **bounds})
