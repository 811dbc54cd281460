"""Image format of a vision-language model: the tensors that it takes of an image, and the tokens
that stand for the image in a prompt. Knows nothing of torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from baton.models.images.encoder_input import TensorData


class ImageFormat(ABC):
    """Format of images. A family of models adds its own, a frozen data class, to this package.

    Attributes:
        placeholder_id: the token that stands for each token of an image.
        max_tokens: tokens of the largest image.
        kind: name by which `image_format_codec` reads the format back.
    """

    __slots__ = ()

    placeholder_id: int
    max_tokens: int
    kind: str

    is_bidirectional: ClassVar[bool] = False
    """Whether the tokens of an image see each other in both directions: then all of an image that
    is not cached is computed in one step."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the image processor, besides those of its configuration."""
        return {}

    @abstractmethod
    def split(self, processed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the tensors of each image.

        Args:
            processed: output of the image processor for several images.
        """

    @abstractmethod
    def span(self, tensors: Mapping[str, TensorData]) -> tuple[int, ...]:
        """Returns the tokens that stand for an image in a prompt, one for each row of its encoder
        output. Raises `InvalidArgumentError` for tensors that the encoder could not compute.

        Args:
            tensors: of one image, by the names of the model's processor.
        """

    @abstractmethod
    def blank(self) -> dict[str, TensorData]:
        """Returns the tensors of a small image, for a trial of the encoder."""
