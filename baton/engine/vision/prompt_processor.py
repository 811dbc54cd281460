"""Prompt processor: a text and its images as token ids and encoder inputs, by the checkpoint's own
processor of transformers, which needs Pillow.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from transformers import AutoProcessor  # not in `models.hf`: text models do without it

from baton.encoder_input import EncoderInput, TensorData, content_hash
from baton.engine.messages import MultimodalPrompt
from baton.errors import InvalidArgumentError
from baton.models.images import PIXEL_VALUES, ImageFormat


class PromptProcessor:
    """Prompt processor of one checkpoint.

    Attributes:
        tokenizer: the checkpoint's tokenizer.
    """

    def __init__(self, path: str, images: ImageFormat) -> None:
        self._processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
        self._images = images
        self._identity = self._processor.image_processor.to_json_string().encode()
        self.tokenizer: Any = self._processor.tokenizer

    def __call__(self, text: str, images: SequenceOf[Any]) -> MultimodalPrompt:
        """Returns the prompt.

        Args:
            text: with the processor's image token once per image, such as "<image>".
            images: images of Pillow.

        Raises `InvalidArgumentError` if the text has another number of image tokens.
        """
        image_token = self._processor.image_token
        if text.count(image_token) != len(images):
            raise InvalidArgumentError(
                "images",
                f"are {len(images)}; the text has {text.count(image_token)} times {image_token!r}",
            )
        if not images:
            return MultimodalPrompt(self.tokenizer(text)["input_ids"])
        given = self._processor(text=text, images=list(images), return_tensors="pt")
        token_ids = tuple(given["input_ids"][0].tolist())
        inputs: list[EncoderInput] = []
        start = 0
        for pixels in given[PIXEL_VALUES]:
            tensors = {PIXEL_VALUES: tensor_data(pixels[None])}
            span = self._images.span(tensors)
            start = token_ids.index(span[0], start)
            inputs.append(
                EncoderInput(content_hash(self._identity, tensors), start, len(span), tensors)
            )
            start += len(span)
        return MultimodalPrompt(token_ids, tuple(inputs))


def tensor_data(tensor: torch.Tensor) -> TensorData:
    """Returns a tensor of a processor as plain data."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorData(dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
