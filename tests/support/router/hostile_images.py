"""Hostile images: bombs, and files that are damaged at random."""

import random
import struct
import zlib
from collections.abc import Iterable, Iterator
from functools import cache

from PIL import Image, PngImagePlugin

from tests.support.engine.images import image
from tests.support.router.images import animated, encoded

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


def jpeg_of_scans(num: int, side: int = 8, between: bytes = b"", header: bytes = b"") -> bytes:
    """Returns a gray progressive JPEG file of a scan of DC and others of AC, `num` in all, that
    change no pixel. `between`: before each of the latter; `header`: before the first one."""

    def segment(code: int, content: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, code, len(content) + 2) + content

    def table(kind: int, symbol: int) -> bytes:
        return segment(0xC4, bytes((kind, 1, *[0] * 15, symbol)))  # of one code, a zero

    def scan(first: int, last: int, num_bits: int) -> bytes:
        ends = bytes((1, 1, 0, first, last, 0))
        return segment(0xDA, ends) + bytes(-(-num_bits // 8))

    num_blocks = (side // 8) ** 2
    num_runs = -(-num_blocks // 2**14)  # of 2^14 blocks each: a code and 14 bits, all zeros
    another = between + scan(1, 63, num_runs * 15)
    return b"".join(
        (
            b"\xff\xd8" + header + segment(0xDB, b"\0" + b"\1" * 64),
            segment(0xC2, struct.pack(">BHHBBBB", 8, side, side, 1, 1, 0x11, 0)),
            table(0x00, 0) + table(0x10, 0xE0),
            scan(0, 0, num_blocks) + another * (num - 1) + b"\xff\xd9",
        )
    )


def gif_frames(num: int) -> bytes:
    return animated([Image.new("L", (16, 16), at % 256) for at in range(num)])


def gif(width: int, height: int, frames: Iterable[tuple[int, int]]) -> bytes:
    """Returns a GIF file whose header says this size, with a pixel of each frame, whose headers say
    theirs."""
    pixel = b"\x02\x02\x44\x01\x00"
    return b"".join(
        (
            b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff",
            *(b"," + struct.pack("<HHHHB", 0, 0, *size, 0) + pixel for size in frames),
            b";",
        )
    )


def apng_claiming(num_frames: int) -> bytes:
    """Returns an animated PNG file of two frames that claims to have others."""
    file = animated([image(1), image(1).rotate(90)], "PNG")
    at = file.index(b"acTL")
    claim = chunk(b"acTL", struct.pack(">II", num_frames, 0))
    return file[: at - 4] + claim + file[at - 4 + len(claim) :]


@cache
def _seeds() -> list[bytes]:
    pictures = [image(1), image(2).convert("L"), image(3).convert("RGBA"), image(4).convert("P")]
    files = []
    for form in FORMS:
        for picture in pictures:
            kept = picture.convert("RGB") if form in ("JPEG", "PPM") else picture
            files.append(encoded(kept, form))
    turned = [image(1).rotate(angle) for angle in range(0, 360, 60)]
    clips = [animated(turned, form) for form in ("GIF", "WEBP", "PNG")]
    return [*files, *clips, gif_frames(5), text_bomb(1000), png_bomb(64)]


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
