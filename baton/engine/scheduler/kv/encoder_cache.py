"""Cache of encoder outputs (of images, say): cached, held or due. Accounting only: no tensor here.

The spans of a prompt that an encoder fills are its encoder inputs. The encoder computes one as a
whole, and its output is needed until the last token of its span is computed. So a sequence holds an
input from the step that first reaches its span to the step that passes it:

    schedule  limit_chunk -> EncoderCache.take         every sequence of the step, in turn
    plan      EncoderCache.drain                       the runner forgets `freed`, then encodes
    apply     EncoderCache.release_passed              and `release_all` when a sequence ends or is
                                                       preempted, at whatever moment

Outputs are shared by content. One that nobody holds stays until its room is needed, least recently
held first. All sizes are in tokens of the prompt: an input is as large as its span.

No deadlock: who holds an input needs nothing more to get past it, and gives it back then; and if
nobody holds any, every input that `check_encoder_inputs` admitted fits.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.engine.scheduler.sequences.encoder_inputs import EncoderInput, passed


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """Encoder work of the runner before a step's forward pass, in this order.

    Attributes:
        freed: content hashes to forget; one may be among the computed again.
        to_compute: inputs to encode and keep, each with a sequence that holds it.
    """

    freed: tuple[bytes, ...]
    to_compute: tuple[tuple[str, EncoderInput], ...]


NO_ENCODER_STEP = EncoderStep((), ())


@dataclass(slots=True)
class _Entry:
    """One output, its holders in the order they came. `is_due`: no plan has asked for it yet."""

    num_tokens: int
    is_due: bool = True
    holders: dict[tuple[str, EncoderInput], None] = field(default_factory=dict)


class EncoderCache:
    """Encoder outputs of at most `capacity_tokens` together, reference-counted and shared.

    A reference is (sequence, input): a sequence that contains the same image twice has two.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._entries: dict[bytes, _Entry] = {}
        self._unheld: OrderedDict[bytes, None] = OrderedDict()  # the next victim first
        self._held: dict[str, dict[EncoderInput, None]] = {}
        self._due: dict[bytes, None] = {}
        self._freed: list[bytes] = []
        self._num_cached_tokens = 0
        self._num_held_tokens = 0

    @property
    def num_cached_tokens(self) -> int:
        """Of all outputs, held or not."""
        return self._num_cached_tokens

    @property
    def num_held_tokens(self) -> int:
        """Of outputs that somebody holds; the rest of the capacity can be allocated."""
        return self._num_held_tokens

    @property
    def num_due_tokens(self) -> int:
        """Of outputs that the step being planned computes: what is used of its budget."""
        return sum(self._entries[content_hash].num_tokens for content_hash in self._due)

    def __contains__(self, content_hash: bytes) -> bool:
        """Whether it need not be computed: it is there, or due in the step being planned."""
        return content_hash in self._entries

    def is_held(self, content_hash: bytes) -> bool:
        """Whether anybody holds it, so that holding it too takes no room."""
        return content_hash in self._entries and content_hash not in self._unheld

    def holds(self, sequence_id: str, encoder_input: EncoderInput) -> bool:
        return encoder_input in self._held.get(sequence_id, ())

    def held_by(self, sequence_id: str) -> tuple[EncoderInput, ...]:
        """The inputs the sequence holds, in the order it took them."""
        return tuple(self._held.get(sequence_id, ()))

    def can_allocate(self, encoder_input: EncoderInput) -> bool:
        """Whether there is room for it beside all that is held. Changes nothing."""
        if self.is_held(encoder_input.content_hash):
            return True
        return self._num_held_tokens + encoder_input.length <= self.capacity_tokens

    def allocate(self, sequence_id: str, encoder_input: EncoderInput) -> bool:
        """Lets the sequence hold an input, which the caller has seen that `can_allocate`.

        Evicts as much as needed. Returns whether it became due: the encoder has to compute it in
        the step being planned, and nothing else will.
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
            self._unheld.pop(content_hash, None)
        entry.holders[sequence_id, encoder_input] = None
        self._held.setdefault(sequence_id, {})[encoder_input] = None
        return is_new

    def take(self, sequence_id: str, encoder_inputs: Iterable[EncoderInput]) -> None:
        """Allocates all that a chunk has `to_hold`.

        Since `limit_chunk`, others may have released but not taken.
        """
        for encoder_input in encoder_inputs:
            self.allocate(sequence_id, encoder_input)

    def release(self, sequence_id: str, encoder_input: EncoderInput) -> None:
        """Gives back the sequence's reference, if it has it.

        What nobody holds stays cached, unless it is still due: then nobody will compute it.
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
            self._unheld[content_hash] = None

    def release_passed(self, sequence_id: str, num_computed_tokens: int) -> None:
        """Gives back the inputs whose last token is computed."""
        for encoder_input in passed(self.held_by(sequence_id), num_computed_tokens):
            self.release(sequence_id, encoder_input)

    def release_all(self, sequence_id: str) -> None:
        """Gives back all that the sequence holds, if anything."""
        for encoder_input in self.held_by(sequence_id):
            self.release(sequence_id, encoder_input)

    @property
    def has_news(self) -> bool:
        """Whether `drain` would say anything."""
        return bool(self._freed or self._due)

    def drain(self) -> EncoderStep:
        """Closes the planning of a step. What is due counts as computed from here on.

        Every eviction and every input to be computed is reported by exactly one call.
        """
        due: list[tuple[str, EncoderInput]] = []
        for content_hash in self._due:
            entry = self._entries[content_hash]
            entry.is_due = False
            due.append(next(iter(entry.holders)))
        step = EncoderStep(tuple(self._freed), tuple(due))
        self._freed.clear()
        self._due.clear()
        return step

    def check_integrity(self) -> None:
        """Asserts that the cache agrees with itself."""
        references = {(s, i): None for s, inputs in self._held.items() for i in inputs}
        assert all(self._held.values()), "a sequence that holds nothing is remembered"
        entered = {holder: h for h, entry in self._entries.items() for holder in entry.holders}
        assert references.keys() == entered.keys(), "holders differ from what sequences hold"
        for (_, encoder_input), content_hash in entered.items():
            assert encoder_input.content_hash == content_hash, "held under another hash"
            assert encoder_input.length == self._entries[content_hash].num_tokens
        unheld = {h for h, entry in self._entries.items() if not entry.holders}
        assert unheld == self._unheld.keys(), "the unheld are not those without holders"
        due = {h for h, entry in self._entries.items() if entry.is_due}
        assert due == self._due.keys(), "the due are not those to be computed"
        assert not unheld & due, "nobody holds what is due"
        cached = sum(entry.num_tokens for entry in self._entries.values())
        held = cached - sum(self._entries[h].num_tokens for h in unheld)
        assert self._num_cached_tokens == cached <= self.capacity_tokens
        assert self._num_held_tokens == held

    def _insert(self, content_hash: bytes, num_tokens: int) -> None:
        while self._num_cached_tokens + num_tokens > self.capacity_tokens:
            victim = self._unheld.popitem(last=False)[0]
            self._remove(victim)
            self._freed.append(victim)
        self._entries[content_hash] = _Entry(num_tokens)
        self._due[content_hash] = None
        self._num_cached_tokens += num_tokens

    def _remove(self, content_hash: bytes) -> None:
        self._num_cached_tokens -= self._entries.pop(content_hash).num_tokens
