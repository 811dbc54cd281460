"""Block copies between two arrays in host memory, from and to scattered places. Knows no layout.

A block is one element, so that numpy moves each with one memcpy, and many in one call.
"""

from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[Any]]
Places = np.ndarray[Any, np.dtype[np.int64]]

# Fits a core's L2 cache beside all else.
_STAGE_BYTES = 256 * 2**10


def as_rows(content: "np.ndarray[Any, np.dtype[np.uint8]]", row_bytes: int) -> Rows:
    """Returns contiguous bytes as elements of `row_bytes` each. A view."""
    return content.reshape(-1).view(np.dtype((np.void, row_bytes)))


def runs(places: Places) -> list[tuple[int, int]]:
    """Returns the runs of consecutive places, as half-open ranges of their indices."""
    cuts = (np.flatnonzero(np.diff(places) != 1) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(places)], strict=True)) if len(places) else []


def copy_rows(
    source: Rows,
    sources: Places,
    target: Rows,
    targets: Places,
    stage_bytes: int = _STAGE_BYTES,
) -> None:
    """Copies `target[targets] = source[sources]`. All places must be in bounds; none is checked.

    If the places of either side form long runs, each byte moves once. If both are scattered, it
    moves through a staging buffer of `stage_bytes`, at about two thirds of the speed.
    """
    into, out_of = runs(targets), runs(sources)
    enough = max(1, len(targets) * target.dtype.itemsize // stage_bytes)
    if len(into) <= min(enough, len(out_of)):
        for start, stop in into:
            first = targets[start]
            _gather(source, sources[start:stop], target[first : first + stop - start])
    elif len(out_of) <= enough:
        for start, stop in out_of:
            first = sources[start]
            target[targets[start:stop]] = source[first : first + stop - start]
    else:
        _copy_staged(source, sources, target, targets, stage_bytes)


def _copy_staged(
    source: Rows, sources: Places, target: Rows, targets: Places, stage_bytes: int
) -> None:
    stage = np.empty(max(1, stage_bytes // target.dtype.itemsize), target.dtype)
    for start in range(0, len(targets), len(stage)):
        part = stage[: len(targets) - start]
        _gather(source, sources[start : start + len(part)], part)
        target[targets[start : start + len(part)]] = part


def _gather(source: Rows, sources: Places, target: Rows) -> None:
    # Any mode but the default writes straight into `out`.
    np.take(source, sources, out=target, mode="clip")
