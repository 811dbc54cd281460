"""Encoder inputs: spans of a prompt that an encoder fills, such as images.

Carries the tensors that an encoder computes from, and reads none of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class TensorData:
    """Tensor as plain data.

    Attributes:
        dtype: name of the element type, as torch has it, such as "float32".
        data: the elements, row-major and little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Encoder output for the tokens [start, start + length) of a sequence, one row per token.

    Attributes:
        content_hash: covers everything that the output depends on, its length included.
        tensors: what the encoder computes the output from, by the names of the model's processor;
            those of one content hash are equal.
    """

    content_hash: bytes
    start: int
    length: int
    tensors: Mapping[str, TensorData] = field(default_factory=dict, compare=False, repr=False)

    @property
    def end(self) -> int:
        return self.start + self.length


def check_encoder_inputs(
    encoder_inputs: Sequence[EncoderInput],
    num_tokens: int,
    capacity_tokens: int,
    compute_budget: int,
    field: str = "encoder_inputs",
) -> None:
    """Raises `InvalidArgumentError` for an encoder input that could never be scheduled.

    Args:
        num_tokens: tokens of the prompt, in which the spans lie, in order and without overlap.
        capacity_tokens: capacity of the encoder cache.
        compute_budget: tokens that the encoder may compute in a step.
    """
    most = min(capacity_tokens, compute_budget)
    limit = "encoder cache" if most == capacity_tokens else "encoder's budget per step"
    lengths: dict[bytes, int] = {}
    free_from = 0
    for i, encoder_input in enumerate(encoder_inputs):
        at = f"{field}[{i}]"
        length = encoder_input.length
        span = f"covers tokens [{encoder_input.start}, {encoder_input.end})"
        if length < 1:
            raise InvalidArgumentError(at, f"is {length} tokens long; must be at least 1")
        if encoder_input.start < free_from:
            raise InvalidArgumentError(at, f"{span}; must start at {free_from} or later")
        if encoder_input.end > num_tokens:
            raise InvalidArgumentError(at, f"{span}; the prompt has {num_tokens} tokens")
        if length > most:
            raise InvalidArgumentError(at, f"is {length} tokens long; the {limit} holds {most}")
        if lengths.setdefault(encoder_input.content_hash, length) != length:
            raise InvalidArgumentError(at, "has the content hash of an input of another length")
        free_from = encoder_input.end


def passed(
    encoder_inputs: Iterable[EncoderInput], num_computed_tokens: int
) -> tuple[EncoderInput, ...]:
    """Returns the inputs whose last token is computed; they may be released."""
    return tuple(i for i in encoder_inputs if i.end <= num_computed_tokens)
