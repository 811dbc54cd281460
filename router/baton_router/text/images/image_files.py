"""Files of images, from their sources: bytes, data URLs, and http and https URLs by policy.

Knows nothing of what is in a file.
"""

import binascii
from collections.abc import Sequence
from itertools import repeat

from baton_router.call.generate_call import GivenClip, GivenImage
from baton_router.text.images.image_fetch import FetchError, ImageFetcher
from baton_router.text.images.image_limits import ImageLimits
from baton_router.text.images.image_source import MAX_CLIP_FRAMES, ImageError, check_number, sampled

_SHOWN_CHARS = 40


class ImageFiles:
    """Reader of images' files, by limits and a policy for URLs.

    Args:
        fetcher: None: no http and https URLs.
    """

    def __init__(self, limits: ImageLimits, fetcher: ImageFetcher | None = None) -> None:
        self._limits = limits
        self._fetcher = fetcher

    async def read(self, images: Sequence[GivenImage]) -> list[list[bytes]]:
        """Returns the files of each: one, but for clips whose frames have one each. Raises
        `ImageError` for the first one that is refused."""
        check_number(images, repeat(1), self._limits.max_per_request)
        found: list[list[bytes]] = []
        num_left = self._limits.max_total_bytes
        for image in images:
            files = await self._read(image)
            num_left -= sum(map(len, files))
            if num_left < 0:
                raise ImageError(
                    image.field,
                    "makes the images of the request too large; together they may have "
                    f"{self._limits.max_total_bytes} bytes",
                )
            found.append(files)
        check_number(images, map(len, found), self._limits.max_per_request)
        return found

    async def _read(self, image: GivenImage) -> list[bytes]:
        source = image.source
        if isinstance(source, bytes):
            files = [source]
        elif source[:5].lower() == "data:":
            files = self._decode(source, image)
        else:
            files = [await self._fetch(source, image.field)]
        if not all(files):
            raise ImageError(image.field, "is empty; expected an encoded image")
        for file in files:
            _check_size(len(file), self._limits.max_bytes, image.field)
        return files

    def _decode(self, url: str, image: GivenImage) -> list[bytes]:
        """Returns the file in a data URL, or the frames that are taken of those of a clip."""
        head, comma, content = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ImageError(
                image.field,
                f"is {url[:_SHOWN_CHARS]!r}; expected a data URL as in data:image/png;base64,...",
            )
        parts = [content]
        if isinstance(image, GivenClip):
            num_frames = content.count(",") + 1
            if num_frames > MAX_CLIP_FRAMES:
                raise ImageError(
                    image.field, f"has {num_frames} frames; at most {MAX_CLIP_FRAMES} are taken"
                )
            parts = content.split(",")
        taken = sampled(len(parts), self._limits.max_clip_frames)
        return [_from_base64(parts[at], self._limits.max_bytes, image.field) for at in taken]

    async def _fetch(self, url: str, field: str) -> bytes:
        scheme = url.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            raise ImageError(
                field,
                f"is {url[:_SHOWN_CHARS]!r}; expected a data URL, or an http or https URL",
            )
        if self._fetcher is None:
            raise ImageError(
                field,
                f"is an {scheme} URL, and this router fetches none. Send a data URL, or start the "
                "router with --images-url-hosts",
            )
        try:
            return await self._fetcher.fetch(url)
        except FetchError as error:
            raise ImageError(field, str(error)) from None


def _from_base64(content: str, max_bytes: int, field: str) -> bytes:
    content = "".join(content.split())  # some clients break lines, and some leave out the padding
    _check_size(len(content) // 4 * 3 - 2, max_bytes, field)  # before it is decoded
    padded = content + "=" * (-len(content) % 4)
    try:
        return binascii.a2b_base64(padded.encode("ascii"), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise ImageError(field, f"is no base64: {error}") from None


def _check_size(num_bytes: int, max_bytes: int, field: str) -> None:
    if num_bytes > max_bytes:
        raise ImageError(field, f"has {num_bytes} bytes; at most {max_bytes} are taken")
