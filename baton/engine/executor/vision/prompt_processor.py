"""Prompt processor: a text and its images as token ids and encoder inputs, by the checkpoint's own
tokenizer and image processor of transformers, which needs Pillow.

It expands placeholders by the model's image format, as transformers' processors do, of which many
cannot be loaded without torchvision.
"""

from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoTokenizer  # not in `models.hf`: for images alone

from baton.engine.request import MultimodalPrompt
from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput, TensorData, content_hash
from baton.models.images.fixed import GemmaImages
from baton.models.images.image_format import ImageFormat
from baton.models.images.rgb import rgb
from baton.models.images.tiled import TiledImages


class PromptProcessor:
    """Prompt processor of one checkpoint.

    Attributes:
        tokenizer: the checkpoint's tokenizer.
    """

    def __init__(self, path: str, images: ImageFormat) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        self._image_processor = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False
        )
        self._images = images
        self._identity = self._image_processor.to_json_string().encode()
        written_id = images.begin_id if isinstance(images, GemmaImages) else images.placeholder_id
        self._image_token: str = self.tokenizer.convert_ids_to_tokens(written_id)
        self._frame = _frame(self.tokenizer, images)

    def __call__(self, text: str, images: SequenceOf[Any]) -> MultimodalPrompt:
        """Returns the prompt.

        Args:
            text: with the model's image token once per image, such as "<image>".
            images: images of Pillow; transparent ones are seen on white.

        Raises `InvalidArgumentError` if the text has another number of image tokens.
        """
        between = text.split(self._image_token)
        if len(between) - 1 != len(images):
            raise InvalidArgumentError(
                "images",
                f"are {len(images)}; the text has {len(between) - 1} times {self._image_token!r}",
            )
        if not images:
            return MultimodalPrompt(self.tokenizer(text)["input_ids"])
        opaque = [rgb(image) for image in images]
        processed = self._image_processor(opaque, return_tensors="pt", **self._images.options)
        given = [
            {name: tensor_data(tensor) for name, tensor in tensors.items()}
            for tensors in self._images.split(processed)
        ]
        spans = [self._images.span(tensors) for tensors in given]
        texts = [*map(self._text_of, spans), ""]
        expanded = "".join(chain.from_iterable(zip(between, texts, strict=True)))
        token_ids = tuple(self.tokenizer(expanded)["input_ids"])
        inputs: list[EncoderInput] = []
        start = 0
        for tensors, span in zip(given, spans, strict=True):
            start = token_ids.index(span[0], start)
            inputs.append(
                EncoderInput(content_hash(self._identity, tensors), start, len(span), tensors)
            )
            start += len(span)
        return MultimodalPrompt(token_ids, tuple(inputs))

    def _text_of(self, span: SequenceOf[int]) -> str:
        """Returns the text of an image's tokens and of those around them."""
        before, after = self._frame
        return before + "".join(self.tokenizer.convert_ids_to_tokens(list(span))) + after


def tensor_data(tensor: torch.Tensor) -> TensorData:
    """Returns a tensor of a processor as plain data."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorData(dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())


def _frame(tokenizer: Any, images: ImageFormat) -> tuple[str, str]:
    """Returns the texts that a family puts before and after an image."""
    if isinstance(images, TiledImages):
        return tokenizer.start_image_token, tokenizer.end_image_token
    if isinstance(images, GemmaImages):
        begin, end = tokenizer.convert_ids_to_tokens([images.begin_id, images.end_id])
        return f"\n\n{begin}", f"{end}\n\n"
    return "", ""
