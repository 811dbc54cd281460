"""Image formats in messages of msgspec, which keep the fields of a data class but not its type."""

from typing import Any, Final

import msgspec

from baton.models.images.families import IMAGE_FORMATS
from baton.models.images.image_format import ImageFormat

_BY_KIND: Final = {each.__name__: each for each in IMAGE_FORMATS}


def decode_image_format(_: type, fields: Any) -> ImageFormat:
    """Returns the format that has been encoded as these fields: `dec_hook` of a decoder. Raises
    `ValueError` for any other fields."""
    match fields:
        case {"kind": str(kind)} if kind in _BY_KIND:
            return msgspec.convert(fields, _BY_KIND[kind])
    raise ValueError("the fields have no kind of an image format")
