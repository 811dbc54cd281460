"""Prompt processor: a text and its images as token ids and encoder inputs, by the checkpoint's own
processor of transformers, which needs Pillow.
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from transformers import AutoProcessor  # not in `models.hf`: text models do without it

from baton.cluster.prefix import HASH_BYTES
from baton.engine.messages import MultimodalPrompt
from baton.engine.scheduler.sequences.encoder_inputs import EncoderInput, TensorData
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
        token_ids = given["input_ids"][0]
        placeholders = (token_ids == self._images.placeholder_id).nonzero().flatten()
        starts = placeholders[:: self._images.num_tokens].tolist()
        inputs = map(self._input, starts, given[PIXEL_VALUES])
        return MultimodalPrompt(tuple(token_ids.tolist()), tuple(inputs))

    def _input(self, start: int, pixels: torch.Tensor) -> EncoderInput:
        tensors = {PIXEL_VALUES: tensor_data(pixels[None])}
        content = content_hash(self._identity, tensors)
        return EncoderInput(content, start, self._images.num_tokens, tensors)


def content_hash(processor: bytes, tensors: Mapping[str, TensorData]) -> bytes:
    """Returns the content hash of an encoder input: the truncated SHA-256 of the processor's
    identity and, in the order of their names, of each tensor's name, dtype, shape and elements.
    Each field follows its length.

    Args:
        processor: identity of the processor: its configuration.
    """
    digest = hashlib.sha256(b"baton.image")
    fields = [processor]
    for name, tensor in sorted(tensors.items()):
        shape = np.array(tensor.shape, "<u8").tobytes()
        fields += [name.encode(), tensor.dtype.encode(), shape, tensor.data]
    for each in fields:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)
    return digest.digest()[:HASH_BYTES]


def tensor_data(tensor: torch.Tensor) -> TensorData:
    """Returns a tensor of a processor as plain data."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorData(dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes())
