"""Files of images, from their sources: bytes, data URLs, and http and https URLs by policy.

Knows nothing of what is in a file.
"""

import binascii
from collections.abc import Sequence

from baton_router.images.image_fetch import FetchError, ImageFetcher
from baton_router.images.image_limits import ImageLimits
from baton_router.images.image_source import GivenImage, ImageError

_SHOWN_CHARS = 40


class ImageFiles:
    """Reader of images' files, by limits and a policy for URLs.

    Args:
        fetcher: None: no http and https URLs.
    """

    def __init__(self, limits: ImageLimits, fetcher: ImageFetcher | None = None) -> None:
        self._limits = limits
        self._fetcher = fetcher

    async def read(self, images: Sequence[GivenImage]) -> list[bytes]:
        """Returns the files. Raises `ImageError` for the first one that is refused."""
        most = self._limits.max_images
        if len(images) > most:
            raise ImageError(
                images[most].field, f"is image {most + 1} of the request; at most {most} are taken"
            )
        files: list[bytes] = []
        num_left = self._limits.max_total_bytes
        for image in images:
            file = await self._read(image)
            num_left -= len(file)
            if num_left < 0:
                raise ImageError(
                    image.field,
                    "makes the images of the request too large; together they may have "
                    f"{self._limits.max_total_bytes} bytes",
                )
            files.append(file)
        return files

    async def _read(self, image: GivenImage) -> bytes:
        source = image.source
        if isinstance(source, bytes):
            file = source
        elif source[:5].lower() == "data:":
            file = _decode(source, self._limits.max_bytes, image.field)
        else:
            file = await self._fetch(source, image.field)
        if not file:
            raise ImageError(image.field, "is empty; expected an encoded image")
        _check_size(len(file), self._limits.max_bytes, image.field)
        return file

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
                "router with --image-url-hosts",
            )
        try:
            return await self._fetcher.fetch(url)
        except FetchError as error:
            raise ImageError(field, str(error)) from None


def _decode(url: str, max_bytes: int, field: str) -> bytes:
    """Returns the file in a data URL."""
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(
            field, f"is {url[:_SHOWN_CHARS]!r}; expected a data URL as in data:image/png;base64,..."
        )
    _check_size(len(content) // 4 * 3 - 2, max_bytes, field)  # before it is decoded
    try:
        return binascii.a2b_base64(content.encode("ascii"), strict_mode=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise ImageError(field, f"is no base64: {error}") from None


def _check_size(num_bytes: int, max_bytes: int, field: str) -> None:
    if num_bytes > max_bytes:
        raise ImageError(field, f"has {num_bytes} bytes; at most {max_bytes} are taken")
