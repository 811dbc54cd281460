"""Scans of a JPEG file, counted before it is decoded.

A decoder of progressive files goes over all pixels for each scan, and a scan may have a hundred
bytes: a file of 410 kB takes it minutes. Encoders write some ten.
"""

import re
from collections.abc import Iterator
from typing import Final

MAX_SCANS: Final = 100
"""Scans of a file that is decoded."""

_MAX_MARKERS = 10_000
_BEGIN = b"\xff\xd8\xff"
# Restarts, which are within a scan, are none here.
_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])")
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_WITHOUT_LENGTH = (0x01, 0xD8, _END_OF_IMAGE)


def why_slow(file: bytes) -> str | None:
    """Returns why a file may take too long to decode; None if it does not, or is no JPEG file."""
    if not file.startswith(_BEGIN):
        return None
    num_scans = 0
    for number, code in enumerate(_markers(file), 1):
        num_scans += code == _START_OF_SCAN
        if num_scans > MAX_SCANS:
            return f"has more than {MAX_SCANS} scans; expected fewer. Save it as a baseline JPEG"
        if number > _MAX_MARKERS:
            return f"has more than {_MAX_MARKERS} segments; expected fewer. Save it again"
    return None


def _markers(file: bytes) -> Iterator[int]:
    """Yields the markers of a file, up to the end of its image."""
    at = len(_BEGIN) - 1
    while match := _MARKER.search(file, at):
        code = file[match.start(1)]
        if code == _START_OF_SCAN:
            yield from _markers_of_scans(file, match.start())
            return
        yield code
        at = _end(file, match)


def _markers_of_scans(file: bytes, first: int) -> Iterator[int]:
    """Yields those from the first scan on.

    A decoder that has lost its place within a scan finds markers in segments, too, which it skips
    elsewhere. So they are looked for everywhere, and an end counts outside of segments alone.
    """
    end = first
    for match in _MARKER.finditer(file, first):
        code = file[match.start(1)]
        if code == _END_OF_IMAGE and match.start() >= end:
            return
        yield code
        end = max(end, _end(file, match))


def _end(file: bytes, match: re.Match[bytes]) -> int:
    """Returns the end of a segment, whose length counts itself."""
    if file[match.start(1)] in _WITHOUT_LENGTH:
        return match.end()
    return match.end() + max(2, int.from_bytes(file[match.end() : match.end() + 2]))
