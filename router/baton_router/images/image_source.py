"""Images as clients give them, and the errors of those that are refused.

Imports none of the optional dependencies by which images are read.
"""

from dataclasses import dataclass

from baton.errors import FailedPreconditionError, InvalidArgumentError


class NoImagesError(FailedPreconditionError):
    """Images for a model that takes none."""


class ImageError(InvalidArgumentError):
    """Image that is refused; the field is the one that the client sent."""


@dataclass(frozen=True, slots=True)
class GivenImage:
    """Image as a client gave it.

    Attributes:
        source: encoded file, or a URL.
        field: path of the field that has it, for errors.
    """

    source: bytes | str
    field: str
