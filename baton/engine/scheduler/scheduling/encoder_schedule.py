"""Chunk limits of prompts with encoder inputs: encoder budget and free encoder cache."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.engine.scheduler.kv.encoder_cache import EncoderCache
from baton.models.images.encoder_input import EncoderInput


@dataclass(frozen=True, slots=True)
class EncoderSchedule:
    """Encoder inputs that a chunk of one sequence needs. Valid until another sequence is scheduled.

    Attributes:
        end: end of the chunk; its start if nothing of it can be computed in this step.
        to_compute: inputs that the encoder has to compute in this step for this sequence.
        to_hold: all inputs to be allocated, in this order: first those that are cached or due,
            before an allocation can evict them; then `to_compute` and inputs of equal content.
        budget_used: tokens of `to_compute`.
    """

    end: int
    to_compute: tuple[EncoderInput, ...]
    to_hold: tuple[EncoderInput, ...]
    budget_used: int


def limit_chunk(
    encoder_inputs: Sequence[EncoderInput],
    start: int,
    end: int,
    cache: EncoderCache,
    sequence_id: str,
    compute_budget: int,
    awaited: Collection[bytes] = (),
) -> EncoderSchedule:
    """Returns the encoder inputs of the chunk [start, end), cut before the first that does not fit.

    Changes nothing; `EncoderCache.take` does, once the chunk is final.

    Args:
        encoder_inputs: inputs of the sequence, in order and without overlap.
        compute_budget: tokens the encoder may still compute in the step being planned: its budget
            less `EncoderCache.num_due_tokens`.
        awaited: content hashes of outputs that are to come from elsewhere.
    """
    room = cache.num_blocks - cache.num_held_blocks
    budget = compute_budget
    to_compute: list[EncoderInput] = []
    present: list[EncoderInput] = []
    absent: list[EncoderInput] = []
    claimed: set[bytes] = set()
    first = bisect_right(encoder_inputs, start, key=lambda i: i.end)
    for encoder_input in encoder_inputs[first:]:
        if encoder_input.start >= end:
            break
        if cache.holds(sequence_id, encoder_input):
            continue
        content_hash, length = encoder_input.content_hash, encoder_input.length
        is_claimed, is_present = content_hash in claimed, content_hash in cache
        is_held = is_claimed or cache.is_held(content_hash)
        room_needed = 0 if is_held else cache.num_blocks_of(length)
        budget_needed = 0 if is_claimed or is_present else length
        is_awaited = content_hash in awaited and not is_present
        if is_awaited or room_needed > room or budget_needed > budget:
            end = max(start, encoder_input.start)
            break
        room -= room_needed
        budget -= budget_needed
        claimed.add(content_hash)
        (present if is_present else absent).append(encoder_input)
        if budget_needed:
            to_compute.append(encoder_input)
    return EncoderSchedule(
        end, tuple(to_compute), (*present, *absent), budget_used=compute_budget - budget
    )
