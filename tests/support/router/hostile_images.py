"""Hostile images: bombs, and files that are damaged at random."""

import random
import struct
import zlib
from collections.abc import Iterator
from functools import cache

from PIL import Image, PngImagePlugin

from tests.support.engine.images import image
from tests.support.router.images import encoded

FORMS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "PPM", "TGA")
_DICTIONARY = (
    b"\x00" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"IDAT", b"IHDR",
    b"\xff\xd8", b"\xff\xc0", b"\xff\xda", b"RIFF", b"WEBP", b"ANMF", b"GIF89a", b",",
)  # fmt: skip


def chunk(kind: bytes, content: bytes) -> bytes:
    crc = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)


def png(width: int, height: int, rows: bytes, depth: int = 8, color: int = 2) -> bytes:
    """Returns a PNG file whose header says these sizes, whatever is in its rows."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def png_bomb(side: int) -> bytes:
    """Returns a small file of `side` x `side` pixels."""
    return png(side, side, bytes((side // 8 + 1) * side), depth=1, color=0)


def text_bomb(num_bytes: int) -> bytes:
    """Returns a small PNG file whose comment has `num_bytes`."""
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * num_bytes, zip=True)
    return encoded(Image.new("RGB", (8, 8)), "PNG", pnginfo=info)


def gif_frames(num: int) -> bytes:
    frames = [Image.new("L", (16, 16), at % 256) for at in range(num)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


@cache
def _seeds() -> list[bytes]:
    pictures = [image(1), image(2).convert("L"), image(3).convert("RGBA"), image(4).convert("P")]
    files = []
    for form in FORMS:
        for picture in pictures:
            kept = picture.convert("RGB") if form in ("JPEG", "PPM") else picture
            files.append(encoded(kept, form))
    return [*files, gif_frames(5), text_bomb(1000), png_bomb(64)]


def damaged(num: int, seed: int = 0) -> Iterator[bytes]:
    """Yields files of all formats with random changes; the same for the same seed."""
    source = random.Random(seed)
    for _ in range(num):
        file = bytearray(source.choice(_seeds()))
        for _ in range(source.randint(1, 8)):
            _damage(file, source)
        yield bytes(file)


def _damage(file: bytearray, source: random.Random) -> None:
    at = source.randrange(len(file) + 1)
    match source.randrange(7):
        case 0 if file:
            file[at % len(file)] ^= 1 << source.randrange(8)
        case 1:
            file[at : at + source.randint(1, 64)] = b""
        case 2:
            file[at:at] = source.randbytes(source.randint(1, 64))
        case 3:
            word = source.choice(_DICTIONARY)
            file[at : at + len(word)] = word
        case 4:
            del file[at:]
        case 5:
            other = source.choice(_seeds())
            file[at:] = other[source.randrange(len(other)) :]
        case _ if len(file) > 64:  # in the header, where sizes are
            place = source.randrange(8, 64)
            file[place : place + 4] = source.randbytes(4)
