"""The checkpoints that ship with Baton, by name."""

from pathlib import Path

_SHIPPED = {"tiny": Path(__file__).parent / "tiny"}

DEFAULT_MODEL = "tiny"


def locate(model: str) -> str:
    """The folder of a shipped model, or `model` itself: a folder or a hub id."""
    return str(_SHIPPED.get(model, model))
