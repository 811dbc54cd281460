"""Expansion of placeholders in prompts: the text or tokens that stand for each image, and where.

The text comes from the model's own processor; nothing here knows a family of models.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.errors import InternalError
from baton.models.images.encoder_input import EncoderInput, TensorData


@dataclass(frozen=True, slots=True)
class ReadImage:
    """Image that is preprocessed.

    Attributes:
        replacement: text that stands for it in a prompt.
        span: tokens of the replacement that the encoder's output fills.
    """

    replacement: str
    span: tuple[int, ...]
    content_hash: bytes
    tensors: Mapping[str, TensorData]


def placeholders(text: str, token: str, cuts: Collection[int] = ()) -> list[int]:
    """Returns the positions of `token` in a text, but for those within which it is cut: they are
    text of users."""
    found, at = [], text.find(token)
    while at >= 0:
        if any(at < cut < at + len(token) for cut in cuts):
            at = text.find(token, at + 1)
        else:
            found.append(at)
            at = text.find(token, at + len(token))
    return found


def expand_text(
    text: str, token: str, places: Sequence[int], replacements: Sequence[str], cuts: Collection[int]
) -> tuple[str, frozenset[int]]:
    """Returns a text whose `token` at each of the places is replaced, and where it is cut then."""
    kept, moved, shift, start = [], set[int](), 0, 0
    for at, replacement in zip(places, replacements, strict=True):
        kept += [text[start:at], replacement]
        moved |= {cut + shift for cut in cuts if start <= cut <= at}
        start = at + len(token)
        shift += len(replacement) - len(token)
    moved |= {cut + shift for cut in cuts if cut >= start}
    return "".join([*kept, text[start:]]), frozenset(moved)


def expand_ids(
    token_ids: Sequence[int], token_id: int, replacements: Sequence[Sequence[int]]
) -> list[int]:
    """Returns tokens with each `token_id`, of which there are as many, replaced."""
    places = [at for at, found in enumerate(token_ids) if found == token_id]
    expanded = list(token_ids[: places[0]]) if places else list(token_ids)
    ends = [*places, len(token_ids)]
    for (at, end), replacement in zip(pairwise(ends), replacements, strict=True):
        expanded += [*replacement, *token_ids[at + 1 : end]]
    return expanded


def find_spans(token_ids: Sequence[int], spans: Sequence[Sequence[int]]) -> list[int]:
    """Returns where each of the spans begins, which follow one another in this order. Raises
    `InternalError` if one is not there: the processor and the model's format disagree."""
    tokens = array("I", token_ids)
    content, size = tokens.tobytes(), tokens.itemsize
    starts: list[int] = []
    at = 0
    for span in spans:
        wanted = array("I", span).tobytes()
        at = content.find(wanted, at)
        while at % size and at >= 0:
            at = content.find(wanted, at + 1)
        if at < 0:
            raise InternalError(
                f"the {len(span)} tokens of image {len(starts) + 1} are not in its prompt; "
                "expected those of the model's processor. Report this checkpoint."
            )
        starts.append(at // size)
        at += len(wanted)
    return starts


def encoder_inputs(
    token_ids: Sequence[int], images: Sequence[ReadImage]
) -> tuple[EncoderInput, ...]:
    """Returns the encoder inputs of a prompt that has the images' tokens, in order."""
    starts = find_spans(token_ids, [image.span for image in images])
    return tuple(
        EncoderInput(image.content_hash, start, len(image.span), image.tensors)
        for image, start in zip(images, starts, strict=True)
    )
