"""Frames that are taken of clips, and the errors of images and clips that are refused.

Imports none of the optional dependencies by which images are read.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import Final

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton_router.call.generate_call import GivenImage

MAX_CLIP_FRAMES: Final = 4096
"""Frames that a clip may have; fewer are taken."""


class NoImagesError(FailedPreconditionError):
    """Images for a model that takes none."""


class ImageError(InvalidArgumentError):
    """Image that is refused; the field is the one that the client sent."""


def sampled(num_frames: int, most: int) -> list[int]:
    """Returns the frames that are taken of a clip: at most `most`, evenly spaced, among them the
    first and, of several, the last."""
    if num_frames <= most:
        return list(range(num_frames))
    return [at * (num_frames - 1) // max(1, most - 1) for at in range(most)]


def check_number(images: Iterable[GivenImage], num_frames: Iterable[int], most: int) -> None:
    """Raises `ImageError` for the image or clip by which a request has more than `most` images.

    Args:
        num_frames: of each, as far as it is known.
    """
    for image, number in zip(images, accumulate(num_frames), strict=False):
        if number > most:
            raise ImageError(
                image.field,
                f"makes {number} images of the request, frames of clips included; at most {most} "
                "are taken",
            )
