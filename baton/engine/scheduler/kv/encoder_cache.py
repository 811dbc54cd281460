"""Encoder cache: blocks with outputs of an encoder (of images, say), cached, held, due or arriving.
Knows block numbers and content hashes only.

The spans of a prompt that an encoder fills are its encoder inputs. The encoder computes an input as
a whole, and its output is needed until the last token of its span is computed. So a sequence holds
an input from the step that first reaches its span to the step that passes it:

    schedule  limit_chunk -> EncoderCache.take         every sequence of the step, one by one
    plan      EncoderCache.drain                       the runner encodes into the blocks
    apply     EncoderCache.note_computed               and `release_passed`; `release_all` when a
                                                       sequence ends or is preempted, at any time

Jobs (`encode_jobs`) hold outputs, too, on behalf of other workers. Outputs are shared by content.
An output without holders stays until its blocks are needed; the least recently held one is evicted
first. An output takes whole blocks, in any order.

No deadlock: a sequence that holds an input needs nothing more to pass it and releases it then; jobs
hold outputs for a bounded time; and without any holder, every input that `check_encoder_inputs`
admitted fits.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from baton.cluster.events.kv_events import KvEvents
from baton.engine.scheduler.kv.block_pool import CacheChanges
from baton.engine.scheduler.sequences.encoder_inputs import passed
from baton.models.images.encoder_input import EncoderInput

Holder = str | int
"""A sequence, by its `encoder_id`, or a job, by its number."""


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """Output of an encoder input: row i is in block `block_ids[i // block_size]`."""

    encoder_input: EncoderInput
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeldOutput:
    """Answer to a job: the blocks that it holds once the step is done.

    Attributes:
        number: the job's.
        block_ids: none for an arrival of an output that is cached.
        was_cached: nothing was computed for it.
    """

    number: int
    block_ids: tuple[int, ...]
    was_cached: bool


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """Encoder work of a step.

    Attributes:
        to_compute: inputs that the runner encodes before the forward pass, and where to.
        held: answers to jobs.
    """

    to_compute: tuple[EncoderOutput, ...] = ()
    held: tuple[HeldOutput, ...] = ()


NO_ENCODER_STEP = EncoderStep()


class OutputState(Enum):
    """State of an encoder output that has blocks."""

    DUE = "due"
    """No plan includes its computation yet."""
    PLANNED = "planned"
    """A plan does, which is not applied yet."""
    ARRIVING = "arriving"
    """Another worker's output is being written."""
    STORED = "stored"


@dataclass(slots=True)
class _Entry:
    """One output and its holders, oldest first."""

    num_tokens: int
    block_ids: tuple[int, ...]
    state: OutputState
    holders: dict[tuple[Holder, EncoderInput], None] = field(default_factory=dict)


class EncoderCache:
    """Encoder outputs in blocks 1 to `num_blocks`, reference-counted and shared.

    A reference is (holder, input): a sequence that contains the same image twice has two.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks, 0, -1))
        self._entries: dict[bytes, _Entry] = {}
        self._freeable: OrderedDict[bytes, None] = OrderedDict()  # the next victim first
        self._held: dict[Holder, dict[EncoderInput, None]] = {}
        self._due: dict[bytes, None] = {}
        self._num_held_blocks = 0
        self._changes = CacheChanges()

    def num_blocks_of(self, num_tokens: int) -> int:
        """Returns the blocks of an output of `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of outputs with a holder; all others can be allocated."""
        return self._num_held_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks of outputs without a holder. Held, these and the empty ones add up to
        `num_blocks`."""
        return self.num_blocks - len(self._free) - self._num_held_blocks

    @property
    def num_due_tokens(self) -> int:
        """Tokens of outputs that the step being planned computes: the used part of its budget."""
        return sum(self._entries[content_hash].num_tokens for content_hash in self._due)

    def __contains__(self, content_hash: bytes) -> bool:
        """Returns True if the output is cached, or due in the step being planned; False while it
        arrives."""
        entry = self._entries.get(content_hash)
        return entry is not None and entry.state is not OutputState.ARRIVING

    def num_tokens_of(self, content_hash: bytes) -> int | None:
        """Returns the tokens of an output that is here or arrives; None: it is not."""
        entry = self._entries.get(content_hash)
        return None if entry is None else entry.num_tokens

    def is_held(self, content_hash: bytes) -> bool:
        """Returns True if the output has a holder, so that one more takes no space."""
        return content_hash in self._entries and content_hash not in self._freeable

    def holds(self, holder: Holder, encoder_input: EncoderInput) -> bool:
        return encoder_input in self._held.get(holder, ())

    def held_by(self, holder: Holder) -> tuple[EncoderInput, ...]:
        """Returns the inputs that a sequence or job holds, in the order it took them."""
        return tuple(self._held.get(holder, ()))

    def blocks_of(self, content_hash: bytes) -> tuple[int, ...]:
        """Returns the blocks of an output, valid while it is held."""
        return self._entries[content_hash].block_ids

    def outputs(
        self, encoder_inputs: Iterable[EncoderInput], start: int, end: int
    ) -> tuple[EncoderOutput, ...]:
        """Returns the outputs that fill some of the tokens [start, end) of a sequence. It holds
        them."""
        return tuple(
            EncoderOutput(i, self.blocks_of(i.content_hash))
            for i in encoder_inputs
            if i.start < end and i.end > start
        )

    def can_allocate(self, encoder_input: EncoderInput) -> bool:
        """Returns True if the input fits beside all that is held. Changes nothing."""
        if self.is_held(encoder_input.content_hash):
            return True
        needed = self.num_blocks_of(encoder_input.length)
        return self._num_held_blocks + needed <= self.num_blocks

    def allocate(self, holder: Holder, encoder_input: EncoderInput) -> bool:
        """Adds a reference to an input for which `can_allocate` is True, and that does not arrive.

        Evicts as much as needed. Returns True if the input became due: the encoder has to compute
        it in the step being planned, and nothing else has asked for it.
        """
        is_new = encoder_input.content_hash not in self._entries
        if is_new:
            self._insert(encoder_input, OutputState.DUE)
            self._due[encoder_input.content_hash] = None
        self._hold(holder, encoder_input)
        return is_new

    def receive(self, holder: Holder, encoder_input: EncoderInput) -> tuple[int, ...]:
        """Allocates the blocks of an output that is not here, and which `holder` will write.
        `can_allocate` is True. A release before `commit` frees them."""
        self._insert(encoder_input, OutputState.ARRIVING)
        self._hold(holder, encoder_input)
        return self.blocks_of(encoder_input.content_hash)

    def commit(self, content_hash: bytes) -> None:
        """Caches an output that has arrived."""
        entry = self._entries[content_hash]
        assert entry.state is OutputState.ARRIVING, "an output that did not arrive"
        self._store(content_hash, entry)

    def take(self, holder: Holder, encoder_inputs: Iterable[EncoderInput]) -> None:
        """Allocates all inputs that a chunk has `to_hold`.

        Since `limit_chunk`, other sequences may have released inputs but not taken any.
        """
        for encoder_input in encoder_inputs:
            self.allocate(holder, encoder_input)

    def release(self, holder: Holder, encoder_input: EncoderInput) -> None:
        """Drops a reference, if there is one.

        An output without holders stays cached, unless it is due or arrives: then it will not come.
        """
        held = self._held.get(holder, {})
        if encoder_input not in held:
            return
        del held[encoder_input]
        if not held:
            del self._held[holder]
        content_hash = encoder_input.content_hash
        entry = self._entries[content_hash]
        del entry.holders[holder, encoder_input]
        if entry.holders:
            return
        self._num_held_blocks -= len(entry.block_ids)
        if entry.state in (OutputState.DUE, OutputState.ARRIVING):
            self._due.pop(content_hash, None)
            self._remove(content_hash)
        else:
            self._freeable[content_hash] = None

    def release_passed(self, holder: Holder, num_computed_tokens: int) -> None:
        """Drops the references to the inputs whose last token is computed."""
        for encoder_input in passed(self.held_by(holder), num_computed_tokens):
            self.release(holder, encoder_input)

    def release_all(self, holder: Holder) -> None:
        """Drops all references of a sequence or job, if it has any."""
        for encoder_input in self.held_by(holder):
            self.release(holder, encoder_input)

    @property
    def has_due(self) -> bool:
        """True if the step being planned computes any output."""
        return bool(self._due)

    def drain(self) -> tuple[EncoderOutput, ...]:
        """Closes the planning of a step and returns each output that it computes, exactly once.
        Later steps may read them."""
        due: list[EncoderOutput] = []
        for content_hash in self._due:
            entry = self._entries[content_hash]
            entry.state = OutputState.PLANNED
            _, encoder_input = next(iter(entry.holders))
            due.append(EncoderOutput(encoder_input, entry.block_ids))
        self._due.clear()
        return tuple(due)

    def note_computed(self, outputs: Iterable[EncoderOutput]) -> None:
        """Caches the outputs of a step that was computed, except those that were evicted since."""
        for output in outputs:
            content_hash = output.encoder_input.content_hash
            entry = self._entries.get(content_hash)
            if entry is not None and entry.state is OutputState.PLANNED:
                self._store(content_hash, entry)

    def evict(self, content_hashes: Iterable[bytes]) -> None:
        """Evicts these outputs, as far as they are cached and have no holder."""
        for content_hash in content_hashes:
            if content_hash in self._freeable:
                self._evict(content_hash)

    def clear(self) -> None:
        """Evicts every output that has no holder."""
        self.evict(tuple(self._freeable))
        self._changes.clear()
        for content_hash, entry in self._entries.items():
            if entry.state is OutputState.STORED:
                self._changes.store(content_hash)

    @property
    def has_events(self) -> bool:
        return bool(self._changes)

    def drain_events(self) -> KvEvents:
        """Returns the content hashes stored and removed since the last call."""
        return self._changes.drain()

    def check_integrity(self) -> None:
        """Asserts that entries, holders, blocks and counts of the cache agree."""
        references = {(s, i): None for s, inputs in self._held.items() for i in inputs}
        assert all(self._held.values()), "a holder of nothing is remembered"
        entered = {holder: h for h, entry in self._entries.items() for holder in entry.holders}
        assert references.keys() == entered.keys(), "holders differ from what they hold"
        for (_, encoder_input), content_hash in entered.items():
            assert encoder_input.content_hash == content_hash, "held under another hash"
            assert encoder_input.length == self._entries[content_hash].num_tokens
        freeable = {h for h, entry in self._entries.items() if not entry.holders}
        assert freeable == self._freeable.keys(), "the freeable are not those without holders"
        due = {h for h, entry in self._entries.items() if entry.state is OutputState.DUE}
        assert due == self._due.keys(), "the due are not those to be computed"
        coming = {h for h, entry in self._entries.items() if entry.state is OutputState.ARRIVING}
        assert not freeable & (due | coming), "an output that is not here has no holder"
        for entry in self._entries.values():
            assert len(entry.block_ids) == self.num_blocks_of(entry.num_tokens)
        taken = [b for entry in self._entries.values() for b in entry.block_ids]
        assert sorted([*taken, *self._free]) == [*range(1, self.num_blocks + 1)], "a block twice"
        held = [b for h in self._entries.keys() - freeable for b in self._entries[h].block_ids]
        assert self._num_held_blocks == len(held), "held blocks are miscounted"

    def _insert(self, encoder_input: EncoderInput, state: OutputState) -> None:
        assert self.can_allocate(encoder_input), "an allocation beyond the capacity"
        needed = self.num_blocks_of(encoder_input.length)
        while len(self._free) < needed:
            self._evict(next(iter(self._freeable)))
        block_ids = tuple(self._free.pop() for _ in range(needed))
        self._entries[encoder_input.content_hash] = _Entry(encoder_input.length, block_ids, state)
        self._num_held_blocks += needed  # by the caller, at once

    def _hold(self, holder: Holder, encoder_input: EncoderInput) -> None:
        assert not self.holds(holder, encoder_input), "an input is held already"
        content_hash = encoder_input.content_hash
        entry = self._entries[content_hash]
        assert entry.num_tokens == encoder_input.length, "one content hash for two lengths"
        if content_hash in self._freeable:
            self._num_held_blocks += len(entry.block_ids)
            del self._freeable[content_hash]
        entry.holders[holder, encoder_input] = None
        self._held.setdefault(holder, {})[encoder_input] = None

    def _store(self, content_hash: bytes, entry: _Entry) -> None:
        entry.state = OutputState.STORED
        self._changes.store(content_hash)

    def _evict(self, content_hash: bytes) -> None:
        del self._freeable[content_hash]
        self._remove(content_hash)

    def _remove(self, content_hash: bytes) -> None:
        entry = self._entries.pop(content_hash)
        self._free.extend(reversed(entry.block_ids))
        if entry.state is OutputState.STORED:
            self._changes.remove(content_hash)
