"""Encoder cache: outputs of an encoder (of images, say), cached, held or due. Holds no tensor.

The spans of a prompt that an encoder fills are its encoder inputs. The encoder computes an input as
a whole, and its output is needed until the last token of its span is computed. So a sequence holds
an input from the step that first reaches its span to the step that passes it:

    schedule  limit_chunk -> EncoderCache.take         every sequence of the step, one by one
    plan      EncoderCache.drain                       the runner forgets `freed`, then encodes
    apply     EncoderCache.release_passed              and `release_all` when a sequence ends or is
                                                       preempted, at any time

Outputs are shared by content. An output without holders stays until its space is needed; the least
recently held one is evicted first. Sizes are in prompt tokens: an input is as large as its span.

No deadlock: a sequence that holds an input needs nothing more to pass it and releases it then; and
without any holder, every input that `check_encoder_inputs` admitted fits.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.encoder_input import EncoderInput
from baton.engine.scheduler.sequences.encoder_inputs import passed


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """Encoder work of the runner before a step's forward pass, in this order.

    Attributes:
        freed: content hashes to forget; `to_compute` may contain one of them again.
        to_compute: inputs to encode and keep.
    """

    freed: tuple[bytes, ...]
    to_compute: tuple[EncoderInput, ...]


NO_ENCODER_STEP = EncoderStep((), ())


@dataclass(slots=True)
class _Entry:
    """One output and its holders, oldest first. `is_due`: no plan includes its computation yet."""

    num_tokens: int
    is_due: bool = True
    holders: dict[tuple[str, EncoderInput], None] = field(default_factory=dict)


class EncoderCache:
    """Encoder outputs of at most `capacity_tokens` tokens, reference-counted and shared.

    A reference is (sequence, input): a sequence that contains the same image twice has two.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._entries: dict[bytes, _Entry] = {}
        self._freeable: OrderedDict[bytes, None] = OrderedDict()  # the next victim first
        self._held: dict[str, dict[EncoderInput, None]] = {}
        self._due: dict[bytes, None] = {}
        self._freed: list[bytes] = []
        self._num_cached_tokens = 0
        self._num_held_tokens = 0

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of all outputs, held or not."""
        return self._num_cached_tokens

    @property
    def num_held_tokens(self) -> int:
        """Tokens of outputs with a holder; the rest of the capacity can be allocated."""
        return self._num_held_tokens

    @property
    def num_due_tokens(self) -> int:
        """Tokens of outputs that the step being planned computes: the used part of its budget."""
        return sum(self._entries[content_hash].num_tokens for content_hash in self._due)

    def __contains__(self, content_hash: bytes) -> bool:
        """Returns True if the output is cached, or due in the step being planned."""
        return content_hash in self._entries

    def is_held(self, content_hash: bytes) -> bool:
        """Returns True if the output has a holder, so that one more takes no space."""
        return content_hash in self._entries and content_hash not in self._freeable

    def holds(self, sequence_id: str, encoder_input: EncoderInput) -> bool:
        return encoder_input in self._held.get(sequence_id, ())

    def held_by(self, sequence_id: str) -> tuple[EncoderInput, ...]:
        """Returns the inputs that the sequence holds, in the order it took them."""
        return tuple(self._held.get(sequence_id, ()))

    def can_allocate(self, encoder_input: EncoderInput) -> bool:
        """Returns True if the input fits beside all that is held. Changes nothing."""
        if self.is_held(encoder_input.content_hash):
            return True
        return self._num_held_tokens + encoder_input.length <= self.capacity_tokens

    def allocate(self, sequence_id: str, encoder_input: EncoderInput) -> bool:
        """Adds a reference of the sequence to an input for which `can_allocate` is True.

        Evicts as much as needed. Returns True if the input became due: the encoder has to compute
        it in the step being planned, and no other sequence has asked for it.
        """
        assert not self.holds(sequence_id, encoder_input), "an input is held already"
        assert self.can_allocate(encoder_input), "allocate() beyond the capacity"
        content_hash = encoder_input.content_hash
        is_new = content_hash not in self._entries
        if is_new:
            self._insert(content_hash, encoder_input.length)
        entry = self._entries[content_hash]
        assert entry.num_tokens == encoder_input.length, "one content hash for two lengths"
        if not entry.holders:
            self._num_held_tokens += entry.num_tokens
            self._freeable.pop(content_hash, None)
        entry.holders[sequence_id, encoder_input] = None
        self._held.setdefault(sequence_id, {})[encoder_input] = None
        return is_new

    def take(self, sequence_id: str, encoder_inputs: Iterable[EncoderInput]) -> None:
        """Allocates all inputs that a chunk has `to_hold`.

        Since `limit_chunk`, other sequences may have released inputs but not taken any.
        """
        for encoder_input in encoder_inputs:
            self.allocate(sequence_id, encoder_input)

    def release(self, sequence_id: str, encoder_input: EncoderInput) -> None:
        """Drops the sequence's reference, if it has one.

        An output without holders stays cached, unless it is due: then it will not be computed.
        """
        held = self._held.get(sequence_id, {})
        if encoder_input not in held:
            return
        del held[encoder_input]
        if not held:
            del self._held[sequence_id]
        content_hash = encoder_input.content_hash
        entry = self._entries[content_hash]
        del entry.holders[sequence_id, encoder_input]
        if entry.holders:
            return
        self._num_held_tokens -= entry.num_tokens
        if entry.is_due:
            del self._due[content_hash]
            self._remove(content_hash)
        else:
            self._freeable[content_hash] = None

    def release_passed(self, sequence_id: str, num_computed_tokens: int) -> None:
        """Drops the references to the inputs whose last token is computed."""
        for encoder_input in passed(self.held_by(sequence_id), num_computed_tokens):
            self.release(sequence_id, encoder_input)

    def release_all(self, sequence_id: str) -> None:
        """Drops all references of the sequence, if it has any."""
        for encoder_input in self.held_by(sequence_id):
            self.release(sequence_id, encoder_input)

    @property
    def has_changes(self) -> bool:
        """True if `drain` would return any work."""
        return bool(self._freed or self._due)

    def drain(self) -> EncoderStep:
        """Closes the planning of a step and returns its encoder work; due inputs count as computed.

        Exactly one call reports every eviction and every input to be computed.
        """
        due: list[EncoderInput] = []
        for content_hash in self._due:
            entry = self._entries[content_hash]
            entry.is_due = False
            due.append(next(iter(entry.holders))[1])
        step = EncoderStep(tuple(self._freed), tuple(due))
        self._freed.clear()
        self._due.clear()
        return step

    def check_integrity(self) -> None:
        """Asserts that entries, holders and counts of the cache agree."""
        references = {(s, i): None for s, inputs in self._held.items() for i in inputs}
        assert all(self._held.values()), "a sequence that holds nothing is remembered"
        entered = {holder: h for h, entry in self._entries.items() for holder in entry.holders}
        assert references.keys() == entered.keys(), "holders differ from what sequences hold"
        for (_, encoder_input), content_hash in entered.items():
            assert encoder_input.content_hash == content_hash, "held under another hash"
            assert encoder_input.length == self._entries[content_hash].num_tokens
        freeable = {h for h, entry in self._entries.items() if not entry.holders}
        assert freeable == self._freeable.keys(), "the freeable are not those without holders"
        due = {h for h, entry in self._entries.items() if entry.is_due}
        assert due == self._due.keys(), "the due are not those to be computed"
        assert not freeable & due, "a due entry has no holder"
        cached = sum(entry.num_tokens for entry in self._entries.values())
        held = cached - sum(self._entries[h].num_tokens for h in freeable)
        assert self._num_cached_tokens == cached <= self.capacity_tokens
        assert self._num_held_tokens == held

    def _insert(self, content_hash: bytes, num_tokens: int) -> None:
        while self._num_cached_tokens + num_tokens > self.capacity_tokens:
            victim = self._freeable.popitem(last=False)[0]
            self._remove(victim)
            self._freed.append(victim)
        self._entries[content_hash] = _Entry(num_tokens)
        self._due[content_hash] = None
        self._num_cached_tokens += num_tokens

    def _remove(self, content_hash: bytes) -> None:
        self._num_cached_tokens -= self._entries.pop(content_hash).num_tokens
