"""Tensors of images, as image processors of transformers return them. Knows nothing of torch."""

import math
from collections.abc import Mapping
from typing import Final

from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import TensorData

PIXEL_VALUES: Final = "pixel_values"
"""Name under which processors return the pixels of an image."""

ELEMENT_BYTES: Final[Mapping[str, int]] = {"float32": 4, "int64": 8}
"""Bytes of an element, by the dtypes that processors return."""


def check_tensors(
    tensors: Mapping[str, TensorData], expected: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Raises `InvalidArgumentError` unless these are the tensors of `expected`, which has the dtype
    and the shape of each."""
    forms = {name: (data.dtype, data.shape) for name, data in tensors.items()}
    if forms != expected:
        raise InvalidArgumentError("tensors", f"are {forms}; expected {dict(expected)}")
    for name, data in tensors.items():
        size = math.prod(data.shape) * ELEMENT_BYTES[data.dtype]
        if len(data.data) != size:
            raise InvalidArgumentError(
                f"tensors[{name!r}]", f"has {len(data.data)} bytes; expected {size}"
            )


def blank_pixels(shape: tuple[int, ...]) -> TensorData:
    """Returns the pixels of an image that is zero everywhere."""
    return TensorData("float32", shape, bytes(math.prod(shape) * ELEMENT_BYTES["float32"]))
