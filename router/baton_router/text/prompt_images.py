"""Images of prompts for one model: read, and expanded where their placeholders are.

Every rejection is a `NoImagesError`, or an `InvalidArgumentError` that names the field.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.errors import ContextLengthError, InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput
from baton_router.call.generate_call import GivenImage, PromptInput, PromptTokens, kind_of
from baton_router.text.chat import RenderedChat
from baton_router.text.images.expansion import (
    ReadImage,
    encoder_inputs,
    expand_ids,
    expand_text,
    placeholders,
)
from baton_router.text.images.image_source import ImageError, NoImagesError
from baton_router.text.model_card import ModelCard

if TYPE_CHECKING:
    from baton_router.text.images.image_reader import ImageCache, ImageReader


class PromptImages:
    """Images of the prompts of one model.

    Args:
        why_none: reason why there is no reader; empty: the model takes no images.

    Attributes:
        reader: reader of images; None: prompts with images are refused.
    """

    def __init__(
        self, card: ModelCard, reader: "ImageReader | None" = None, why_none: str = ""
    ) -> None:
        self.reader = reader
        self._card = card
        self._why_none = why_none

    @property
    def are_taken(self) -> bool:
        """True if prompts may have images."""
        return self.reader is not None

    @property
    def cache(self) -> "ImageCache | None":
        """Preprocessed images of earlier requests; None: requests may have none."""
        return None if self.reader is None else self.reader.cache

    async def read(
        self, images: Sequence[GivenImage], holder: str, salt: bytes | None
    ) -> list[list[ReadImage]]:
        """Returns the frames of each image and clip. Arguments as of `ImageReader.read`."""
        if not images:
            return []
        read = await self._reader().read(images, salt, holder)
        num_tokens = sum(len(image.span) for frames in read for image in frames)
        if num_tokens > self._card.max_model_len:  # before they are tokenized
            limit = self._card.max_model_len
            raise ContextLengthError(
                images[-1].field,
                f"makes the images of the request {num_tokens} tokens; this model's maximum "
                f"context length is {limit} tokens. Send fewer or smaller images.",
                num_tokens,
                limit,
            )
        return read

    async def check(self, given: Sequence[EncoderInput], ids: list[int]) -> PromptTokens:
        """Returns the prompt of a client that has preprocessed its images."""
        # Their hashes are computed here: the engine believes them.
        return PromptTokens(ids, await self._reader().check(list(given), ids))

    def expand_ids(self, ids: list[int], images: Sequence[ReadImage]) -> PromptTokens:
        """Returns a prompt with a placeholder for each image, expanded."""
        reader = self.reader
        if reader is None or not images:
            return PromptTokens(ids)
        _check_placeholders(ids.count(reader.placeholder_id), images, reader, "input.token_ids")
        texts = {image.replacement for image in images}
        ids_of = {text: self._card.encode_rendered(text) for text in texts}
        replacements = [ids_of[image.replacement] for image in images]
        expanded = expand_ids(ids, reader.placeholder_id, replacements)
        return PromptTokens(expanded, encoder_inputs(expanded, images))

    def expand(self, given: RenderedChat, images: Sequence[ReadImage], field: str) -> RenderedChat:
        """Returns a text with its placeholders expanded. Raises `InvalidArgumentError` unless it
        has one for each image."""
        reader = self.reader
        if reader is None:
            return given
        places = placeholders(given.text, reader.placeholder, given.cuts)
        _check_placeholders(len(places), images, reader, field)
        replacements = [image.replacement for image in images]
        return RenderedChat(
            *expand_text(given.text, reader.placeholder, places, replacements, given.cuts)
        )

    def _reader(self) -> "ImageReader":
        """Returns the reader of images. Raises `NoImagesError` if there is none."""
        if self.reader is None:
            raise NoImagesError(
                self._why_none
                or f"model {self._card.name!r} takes no images; expected a vision-language model, "
                "such as LLaVA"
            )
        return self.reader


def check_image_fields(
    given: PromptInput, images: Sequence[GivenImage], encoder_inputs: Sequence[EncoderInput]
) -> None:
    """Refuses images in fields that exclude each other."""
    kind = kind_of(given)
    if images and kind == "chat":
        raise ImageError("images", "is set beside chat; expected them in parts of its messages")
    if encoder_inputs and (kind != "token_ids" or images):
        raise ImageError(
            "encoder_inputs", "is set; expected only with token_ids, and without images"
        )


def _check_placeholders(
    num: int, images: Sequence[ReadImage], reader: "ImageReader", field: str
) -> None:
    if num != len(images):
        raise InvalidArgumentError(
            field,
            f"has {num} times {reader.placeholder!r}; expected it once for each of the "
            f"{len(images)} images",
        )
