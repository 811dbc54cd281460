"""Checkpoint lookup: models shipped with Baton, folders, and the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from baton.errors import UnsupportedModelError

_SHIPPED = {"tiny": Path(__file__).parent / "tiny"}

DEFAULT_MODEL = "tiny"
# Printed by the commands that serve it.
INTRODUCTION = (
    "The model, tiny, is a 6 MB toy that writes text like Python. "
    "A real one: baton up --model Qwen/Qwen3-0.6B"
)
# What describes a checkpoint, and what its weights are read from.
DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model")
WEIGHTS = ("*.safetensors",)


def locate(model: str) -> str:
    """Returns the folder of a shipped model, or `model` itself: a folder or a hub id."""
    return str(_SHIPPED.get(model, model))


def checkpoint_folder(path: str, patterns: Sequence[str]) -> Path:
    """Returns the folder itself, of a shipped model, or of a hub id's files, which are fetched
    unless they are in the hub's cache. Raises `UnsupportedModelError` if it is none of these."""
    folder = Path(locate(path))
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"{path!r} is neither a folder nor a model that the hub gives: {first_line}"
        ) from None
