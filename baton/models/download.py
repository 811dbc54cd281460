"""Progress of downloads from the Hugging Face hub."""

from collections.abc import Callable
from typing import Any

from huggingface_hub.utils import tqdm

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
