"""Scans of JPEG files, against what Pillow writes and reads."""

import io
import struct

import pytest
from PIL import Image

from baton_router.text.images.jpeg_scans import MAX_SCANS, why_slow
from tests.support.engine.images import image
from tests.support.router.hostile_images import jpeg_of_scans
from tests.support.router.images import animated, encoded

MOST = jpeg_of_scans(MAX_SCANS)
SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00"


def hidden(code: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, code, len(content) + 2) + content


TAKEN = {
    "baseline": lambda: encoded(image(1), "JPEG"),
    "progressive": lambda: encoded(image(1), "JPEG", progressive=True),
    "as many scans as are taken": lambda: MOST,
    "scans of a thumbnail": lambda: jpeg_of_scans(2, header=hidden(0xE1, SCAN * 200)),
    "a file after it": lambda: encoded(image(1), "JPEG") + SCAN * 200,
    "several images": lambda: animated([image(1), image(2)] * 60, "MPO"),
    "restarts": lambda: jpeg_of_scans(9, between=b"\xff\xd0" * 20_000),
    "PNG": lambda: encoded(image(1)) + SCAN * 200,
}
REFUSED = {
    "scans": (lambda: jpeg_of_scans(MAX_SCANS + 1), "more than 100 scans"),
    "thousands of scans": (lambda: jpeg_of_scans(3000, 800), "more than 100 scans"),
    "fill bytes": (lambda: jpeg_of_scans(101, between=b"\xff" * 7), "more than 100 scans"),
    "bytes between": (lambda: jpeg_of_scans(101, between=b"abc"), "more than 100 scans"),
    "scans in a segment": (
        lambda: jpeg_of_scans(2, between=hidden(0x02, SCAN * 100)),
        "more than 100 scans",
    ),
    "an end in a segment": (
        lambda: jpeg_of_scans(101, between=hidden(0xE5, b"\xff\xd9")),
        "more than 100 scans",
    ),
    "an end in a segment before": (
        lambda: jpeg_of_scans(101, header=hidden(0xE5, b"\xff\xd9")),
        "more than 100 scans",
    ),
    "segments before": (
        lambda: jpeg_of_scans(1, header=hidden(0xE5, b"") * 10_001),
        "more than 10000 segments",
    ),
    "segments between": (
        lambda: jpeg_of_scans(2, between=hidden(0xE5, b"") * 10_001),
        "more than 10000 segments",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_file_of_few_scans_is_taken(name):
    assert why_slow(TAKEN[name]()) is None


@pytest.mark.parametrize("name", REFUSED)
def test_file_of_many_scans_is_refused(name):
    make_file, part = REFUSED[name]
    assert part in (why_slow(make_file()) or "")


def test_file_of_many_scans_is_a_valid_one():
    with Image.open(io.BytesIO(MOST)) as read:
        assert read.tobytes() == b"\x80" * 64
