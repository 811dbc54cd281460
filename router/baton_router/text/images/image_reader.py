"""Reader of the images of requests to one model: from their sources to what its encoder takes."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain
from typing import NamedTuple

from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput, TensorData, content_hash
from baton.models.images.image_format import ImageFormat
from baton.serving.tenant import DEFAULT_TENANT
from baton_router.call.generate_call import GivenClip, GivenImage
from baton_router.text.images.expansion import ReadImage
from baton_router.text.images.image_fetch import AllowedHosts, ImageFetcher
from baton_router.text.images.image_files import ImageFiles
from baton_router.text.images.image_limits import ImageLimits, comma_list
from baton_router.text.images.image_messages import PreprocessedImage
from baton_router.text.images.image_pool import ImagePool, RefusedImageError
from baton_router.text.images.image_source import ImageError, check_number
from baton_router.text.salted_cache import SaltedCache

# Bytes of a file or of tensors above which a thread hashes them.
_THREAD_FROM_BYTES = 2**18

Frames = tuple[ReadImage, ...]


class FileKey(NamedTuple):
    """Key of a file's frames.

    Attributes:
        salt: of the tenant's caches.
        max_frames: frames that are taken of the file at most.
    """

    salt: bytes
    digest: bytes
    max_frames: int


class ImageCache(SaltedCache[FileKey, Frames]):
    """Cache of preprocessed images by the content of their files, bounded by the bytes of their
    tensors: a conversation does not decode its images again in each turn."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda _, frames: _num_bytes(frames))


class ImageReader:
    """Reader of images for one model.

    Attributes:
        pool: processes that decode them.
        placeholder, placeholder_id: token that stands for an image until it is expanded.
        max_images: images of one request, frames of clips included.
        cache: preprocessed images of earlier requests.
    """

    def __init__(
        self,
        files: ImageFiles,
        pool: ImagePool,
        images: ImageFormat,
        identity: bytes,
        placeholder: tuple[str, int],
        limits: ImageLimits,
    ) -> None:
        self._files = files
        self.pool = pool
        self._format = images
        self._identity = identity
        self.placeholder, self.placeholder_id = placeholder
        self.max_images = limits.max_per_request
        self.cache = ImageCache(limits.cache_bytes)
        self._max_clip_frames = limits.max_clip_frames

    async def read(
        self,
        images: Sequence[GivenImage],
        salt: bytes | None = None,
        holder: str = DEFAULT_TENANT,
    ) -> list[list[ReadImage]]:
        """Returns the frames of each, in order: of an image one. Raises `ImageError` for one that
        is refused, and as `ImagePool.process`.

        Args:
            salt: of the tenant whose cached images are taken; None: none are.
            holder: the tenant's name.
        """
        files = await self._files.read(images)
        read = await asyncio.gather(*map(partial(self._read, holder, salt), images, files))
        check_number(images, map(len, read), self.max_images)
        return read

    async def _read(
        self, holder: str, salt: bytes | None, image: GivenImage, files: Sequence[bytes]
    ) -> list[ReadImage]:
        is_animation = isinstance(image, GivenClip) and len(files) == 1
        read = partial(self._frames, holder, salt, self._max_clip_frames if is_animation else 1)
        try:
            return list(chain.from_iterable(await asyncio.gather(*map(read, files))))
        except RefusedImageError as error:
            raise ImageError(image.field, str(error)) from None
        except InvalidArgumentError as error:
            raise ImageError(image.field, f"has {error}") from None

    async def _frames(
        self, holder: str, salt: bytes | None, max_frames: int, file: bytes
    ) -> Frames:
        if salt is None:
            return await self._process(file, max_frames, holder)
        key = FileKey(salt, await _digest(file), max_frames)
        frames = self.cache.get(key)
        if frames is None:
            frames = await self._process(file, max_frames, holder)
            self.cache.put(key, frames, holder)
        return frames

    async def _process(self, file: bytes, max_frames: int, holder: str) -> Frames:
        images = await self.pool.process(file, max_frames, holder)
        return tuple([await self._preprocessed(image) for image in images])

    async def _preprocessed(self, image: PreprocessedImage) -> ReadImage:
        span = self._format.span(image.tensors)
        return ReadImage(image.replacement, span, await self._hash(image.tensors), image.tensors)

    async def check(
        self, inputs: Sequence[EncoderInput], token_ids: Sequence[int]
    ) -> tuple[EncoderInput, ...]:
        """Returns preprocessed images of a client with their content hashes. Raises `ImageError`
        unless each fits the model, and its tokens are in the prompt."""
        if len(inputs) > self.max_images:
            raise ImageError(
                "encoder_inputs", f"has {len(inputs)} items; at most {self.max_images} are taken"
            )
        checked, end = [], 0
        for at, given in enumerate(inputs):
            field = f"encoder_inputs[{at}]"
            try:
                span = self._format.span(given.tensors)
            except InvalidArgumentError as error:
                raise ImageError(f"{field}.{error.field}", error.problem) from None
            if given.length != len(span):
                raise ImageError(f"{field}.length", f"is {given.length}; expected {len(span)}")
            if given.start < end or tuple(token_ids[given.start : given.end]) != span:
                raise ImageError(
                    f"{field}.start",
                    f"is {given.start}; expected where the image's {len(span)} tokens begin in "
                    "token_ids, after those of the image before",
                )
            end = given.end
            digest = await self._hash(given.tensors)
            checked.append(EncoderInput(digest, given.start, given.length, given.tensors))
        return tuple(checked)

    async def _hash(self, tensors: Mapping[str, TensorData]) -> bytes:
        if sum(len(tensor.data) for tensor in tensors.values()) < _THREAD_FROM_BYTES:
            return content_hash(self._identity, tensors)
        return await asyncio.to_thread(content_hash, self._identity, tensors)


async def _digest(file: bytes) -> bytes:
    if len(file) < _THREAD_FROM_BYTES:
        return hashlib.sha256(file).digest()
    return (await asyncio.to_thread(hashlib.sha256, file)).digest()


async def start_reader(
    folder: str, limits: ImageLimits, stack: AsyncExitStack
) -> ImageReader | None:
    """Returns a reader whose first process runs; None: the checkpoint's model takes no images.
    Closing the stack ends its processes. Raises `UnsupportedModelError`."""
    pool = ImagePool(folder, limits, limits.processes)
    stack.push_async_callback(pool.close)
    facts = await pool.start()
    if facts.format is None:
        return None
    fetcher = None
    if hosts := comma_list(limits.url_hosts):
        allowed = AllowedHosts(hosts, comma_list(limits.url_networks))
        fetcher = ImageFetcher(allowed, limits.max_bytes, limits.url_timeout_s)
    return ImageReader(
        ImageFiles(limits, fetcher),
        pool,
        facts.format,
        facts.identity,
        (facts.placeholder, facts.placeholder_id),
        limits,
    )


def _num_bytes(frames: Frames) -> int:
    return sum(len(tensor.data) for frame in frames for tensor in frame.tensors.values())
