"""Sources of the encoder outputs, such as those of images, that a prompt needs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EncoderChoice:
    """Source of one encoder output that the computing worker lacks.

    Attributes:
        input: index of the encoder input in the request.
        num_tokens: its tokens.
        worker: source; empty: the computing worker encodes it itself.
        only_cached: the source has it cached, and computes nothing.
        terms: seconds from now until the computing worker has the output, by term; if it encodes it
            itself, from its turn in the prompt.
    """

    input: int
    num_tokens: int
    worker: str = ""
    only_cached: bool = False
    terms: Mapping[str, float] = field(default_factory=dict)
