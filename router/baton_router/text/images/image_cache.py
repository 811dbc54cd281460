"""Cache of preprocessed images by the content of their files.

A conversation does not decode its images again in each turn.
"""

from collections import OrderedDict
from typing import NamedTuple

from baton_router.text.images.expansion import ReadImage

Frames = tuple[ReadImage, ...]


class FileKey(NamedTuple):
    """Key of a file's frames.

    Attributes:
        salt: of the tenant's caches: the time of a request must not reveal other tenants' images.
        max_frames: frames that are taken of the file at most.
    """

    salt: bytes
    digest: bytes
    max_frames: int


class ImageCache:
    """Least recently used cache of the images of one model, bounded by the bytes of their tensors.

    Attributes:
        num_bytes: bytes held.
        num_hits, num_misses: files that were looked up.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._max_bytes = max_bytes
        self._frames: OrderedDict[FileKey, Frames] = OrderedDict()  # the next victim first

    def get(self, key: FileKey) -> Frames | None:
        """Returns the frames of a file; None: they are not cached."""
        frames = self._frames.get(key)
        if frames is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._frames.move_to_end(key)
        return frames

    def put(self, key: FileKey, frames: Frames) -> None:
        """Keeps the frames of a file, unless they alone exceed the bound."""
        num_bytes = _num_bytes(frames)
        if num_bytes > self._max_bytes or key in self._frames:
            return
        self._frames[key] = frames
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _, evicted = self._frames.popitem(last=False)
            self.num_bytes -= _num_bytes(evicted)

    def drop(self, salt: bytes | None) -> None:
        """Drops the images of the tenants of one salt; None: all images."""
        for key in [key for key in self._frames if salt in (None, key.salt)]:
            self.num_bytes -= _num_bytes(self._frames.pop(key))


def _num_bytes(frames: Frames) -> int:
    return sum(len(tensor.data) for frame in frames for tensor in frame.tensors.values())
