"""Bounds of the encoder inputs of a sequence, which a chunk would cut, and which are passed."""

from collections.abc import Iterable, Sequence

from baton.errors import EngineLimitError, InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput


def check_encoder_inputs(
    encoder_inputs: Sequence[EncoderInput],
    num_tokens: int,
    capacity_tokens: int,
    compute_budget: int,
    field: str = "encoder_inputs",
) -> None:
    """Raises `InvalidArgumentError` for an encoder input that could never be scheduled; an
    `EngineLimitError` if it is larger than one of the last two arguments.

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
            raise EngineLimitError(at, f"is {length} tokens long; the {limit} holds {most}")
        if lengths.setdefault(encoder_input.content_hash, length) != length:
            raise InvalidArgumentError(at, "has the content hash of an input of another length")
        free_from = encoder_input.end


def passed(
    encoder_inputs: Iterable[EncoderInput], num_computed_tokens: int
) -> tuple[EncoderInput, ...]:
    """Returns the inputs whose last token is computed; they may be released."""
    return tuple(i for i in encoder_inputs if i.end <= num_computed_tokens)


def uncut_end(encoder_inputs: Iterable[EncoderInput], start: int, end: int) -> int:
    """Returns the end of a chunk [start, end) that ends before the input that it would cut; `start`
    if it begins within that input."""
    for encoder_input in encoder_inputs:
        if encoder_input.start < end < encoder_input.end:
            return max(start, encoder_input.start)
    return end
