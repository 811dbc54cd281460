"""Chat templates with the guards and branches of the families that coding agents use.

Each has what its family's template refuses, drops, counts on and writes, in words of its own.
"""

from pathlib import Path

_HERE = Path(__file__).parent
FAMILIES = tuple(sorted(path.stem for path in _HERE.glob("*.jinja")))


def template_of_family(name: str) -> str:
    """Returns the template of a family."""
    return (_HERE / f"{name}.jinja").read_text()
