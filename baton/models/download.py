"""Downloads from the Hugging Face hub, with their progress."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from baton.errors import UnsupportedModelError

OnBytes = Callable[[int, int], None]
"""Function that takes the bytes that are here, and those of all files."""

_BYTES_OF_ALL_FILES = "huggingface_hub.snapshot_download"


def reporting(on_bytes: OnBytes) -> type[tqdm]:
    """Returns a class of progress bars that report the bytes of a download and show nothing."""

    class Reporting(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *args: Any, **given: Any) -> None:
            self._counts_all = given.get("name") == _BYTES_OF_ALL_FILES
            # A bar that is disabled counts nothing.
            super().__init__(*args, **{**given, "disable": False})

        def display(self, *_args: Any, **_given: Any) -> None:
            """Shows nothing."""

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self._counts_all:
                on_bytes(int(self.n), int(self.total or 0))
            return shown

    return Reporting


def fetched(
    model_id: str,
    revision: str | None,
    patterns: Sequence[str],
    path: str,
    on_bytes: OnBytes,
) -> Path:
    """Returns the folder of a hub id's files, which are fetched unless they are in the hub's cache.
    Raises `UnsupportedModelError`, which names `path`."""
    try:
        return Path(
            snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=list(patterns),
                tqdm_class=reporting(on_bytes),
            )
        )
    except RepositoryNotFoundError:
        raise UnsupportedModelError(
            f"no folder {path!r} here, and the Hugging Face hub has no such model, or not for you: "
            "check its name; a private one needs HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UnsupportedModelError(
            f"the Hugging Face hub has no revision {revision!r} of {model_id!r}; expected a "
            "branch, a tag or a commit"
        ) from None
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no network"
        if isinstance(error.__cause__, HfHubHTTPError):
            why = str(error.__cause__).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"no folder {path!r} here, and the Hugging Face hub cannot be reached ({why}); give a "
            "folder, or a model that the hub's cache has"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise UnsupportedModelError(
            f"no folder {path!r} here, and the Hugging Face hub gives no such model: {first_line}"
        ) from None
