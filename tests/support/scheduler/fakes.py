"""A runner without a model: its pools hold, in place of keys, the tokens they were made from.

Every slot of every block remembers a hash of the prefix that was written there, so that reading a
block which is stale, foreign, overwritten or missing is noticed at once. The next token is a
function of all tokens before it, so that one lost or doubled changes everything after it. A
slot not written or cleared since its block was handed out is poison, and must not be read.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
from zlib import crc32

import numpy as np

from baton.engine.request import FinishReason
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.engine.scheduler.kv.memory_operations import BlockMove
from baton.engine.scheduler.plan import StepPlan, StepResult, TokenLogprobs
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK, BatchSlots
from baton.engine.scheduler.sequences.beam import BeamSearch
from baton.engine.scheduler.sequences.sequence import Request, Sequence
from baton.models.images.encoder_input import EncoderInput

VOCAB_SIZE = 11
CLEARED = 0
POISON = -1

Tokens = tuple[int, ...]
Inputs = tuple[EncoderInput, ...]


# A model of tokens alone.


@lru_cache(maxsize=50_000)
def prefix_states(root: bytes, token_ids: Tokens, inputs: Inputs = ()) -> tuple[int, ...]:
    """For each token, a number that stands for it, all before it, the root and encoder inputs."""
    if not token_ids:
        return ()
    before = prefix_states(root, token_ids[:-1], inputs)
    position = len(token_ids) - 1
    seen = bytes([token_ids[-1]])
    for item in inputs:
        if item.start <= position < item.end:
            seen += item.content_hash + bytes([position - item.start])
    return (*before, crc32(seen, before[-1] if before else crc32(root)))


def states_of(request: Request, token_ids: Iterable[int]) -> tuple[int, ...]:
    return prefix_states(request.root, tuple(map(int, token_ids)), request.spec.encoder_inputs)


def next_token(state: int, index: int = 0) -> int:
    """Returns the token that sequence `index` of a request has after a prefix."""
    return crc32(bytes([index]), state) // 64 % VOCAB_SIZE


def candidates(state: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens that may follow a prefix with their scores, best first. No two are equal."""
    scores = [-(crc32(bytes([t, 77]), state) % 9973 + t / 16) / 1000 for t in range(VOCAB_SIZE)]
    order = sorted(range(VOCAB_SIZE), key=lambda t: -scores[t])
    return np.array(order, np.int64), np.array([scores[t] for t in order], np.float32)


def score_of(state: int, token_id: int) -> float:
    """The log-probability of a prompt token after a prefix."""
    return -float(crc32(bytes([token_id, 99]), state) % 1000)


@dataclass(frozen=True)
class FakeGrammar:
    """Is matched to its end, or cannot be followed any further, once in `period` prefixes each."""

    period: int

    def ending(self, state: int) -> FinishReason | None:
        endings = {0: FinishReason.END_OF_SEQUENCE, 1: FinishReason.FAILED}
        return endings.get(state // 7 % self.period)


def ending_of(request: Request, state: int) -> FinishReason | None:
    """Returns how the request's grammar ends a sequence with this prefix."""
    return request.grammar.ending(state) if isinstance(request.grammar, FakeGrammar) else None


def given_to(request: Request, index: int) -> Tokens:
    """Returns the tokens that a sequence of the request has from elsewhere, after the prompt and
    before it forks."""
    return (request.outputs[index - request.spec.sequence_index] or ()) if request.outputs else ()


def alone(request: Request, index: int) -> tuple[list[int], FinishReason]:
    """The tokens that a sequence of the request produces with the machine to itself, behind those
    it was given."""
    tokens = [*request.spec.token_ids, *given_to(request, index)]
    num_given = len(tokens)
    while True:
        tokens.append(next_token(states_of(request, tokens)[-1], index))
        reason = ending_of(request, states_of(request, tokens)[-1])
        reason = reason or request.reason_to_end(tokens[-1], len(tokens))
        if reason is not None:
            return tokens[num_given:], reason


def beams_alone(request: Request) -> list[tuple[tuple[int, ...], float]]:
    """The hypotheses that a request with beams ends with, best first, and their scores."""
    params = request.spec.params
    search = BeamSearch(
        width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_ids=request.eos_token_ids | request.stop_token_ids,
        max_tokens=params.max_tokens,
    )
    beams: list[Tokens] = [tuple(request.spec.token_ids)]
    while not search.is_done:
        rows = [candidates(states_of(request, beam)[-1]) for beam in beams]
        k = search.num_candidates
        step = search.advance(
            np.stack([tokens[:k] for tokens, _ in rows]),
            np.stack([scores[:k] for _, scores in rows]),
        )
        beams = [(*beams[c.parent], c.token_id) for c in step.beams]
    return [(found.token_ids, found.score) for found in search.results(params.n)]


# Pools.


class RecordingPool(BlockPool):
    """Remembers what it has handed out, so that a runner can poison it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.handed_out: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        block_ids = super().allocate(count)
        self.handed_out.update(block_ids)
        return block_ids


def cache_group(num_blocks: int, window: int | None = None, num_host_blocks: int = 0) -> CacheGroup:
    host = RecordingPool(num_host_blocks) if num_host_blocks else None
    return CacheGroup(RecordingPool(num_blocks), window, host)


Block = list[int]


class FakePool:
    """The content of one pool, slot by slot."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        assert isinstance(pool, RecordingPool)
        self._pool = pool
        self._block_size = block_size
        self.blocks: list[Block] = [[POISON] * block_size for _ in range(pool.num_blocks + 1)]
        self.blocks[NULL_BLOCK] = [CLEARED] * block_size

    def poison(self) -> None:
        """Poisons every block that was handed out."""
        for block_id in self._pool.handed_out:
            self.blocks[block_id] = [POISON] * self._block_size
        self._pool.handed_out.clear()


# The runner.


@dataclass(frozen=True)
class Work:
    """The tokens [start, end) of a sequence; None: it has ended since the plan was made."""

    sequence: Sequence | None
    start: int
    end: int


class FakeRunner:
    """Follows plans as the real one does, and asserts all that a plan promises."""

    def __init__(
        self, batch_slots: BatchSlots, groups: SequenceOf[CacheGroup], block_size: int
    ) -> None:
        self.block_size = block_size
        self.groups = tuple(groups)
        self.known: dict[tuple[str, int], Sequence] = {}
        self.encoded: dict[int, EncoderOutput] = {}  # the latest in each encoder block
        self._batch_slots = batch_slots
        self._pools = [FakePool(group.pool, block_size) for group in groups]
        self._hosts = [FakePool(g.host, block_size) if g.host else None for g in groups]

    def run(self, plan: StepPlan) -> StepResult:
        self._introduce(plan)
        self._move_blocks(plan)
        self._encode(plan)
        work = self._work(plan)
        here = [(item, item.sequence) for item in work if item.sequence is not None]
        self._write(here)
        for i, (item, sequence) in enumerate(here):
            self._check_reads(item, sequence, is_decode=i < len(plan.decode_slots))
        return self._choose(plan, work)

    # Content, for tests to look at and for other workers to fill.

    def content(self, group: int, block_id: int) -> Block:
        return self._pools[group].blocks[block_id]

    def receive(self, group: int, block_id: int, states: SequenceOf[int]) -> None:
        """Another worker's block arrives, cleared behind its last token."""
        padding = [CLEARED] * (self.block_size - len(states))
        self._pools[group].blocks[block_id] = [*states, *padding]

    def check_content(
        self, tables: SequenceOf[SequenceOf[int]], states: SequenceOf[int], first_query: int
    ) -> None:
        """Asserts that tables hold all of a prefix that tokens from `first_query` on can see."""
        size = self.block_size
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            begin = 0 if group.window is None else max(0, first_query - group.window + 1)
            for p in range(begin, len(states)):
                assert table[p // size] != NULL_BLOCK, f"group {g}: no block for position {p}"
                slot = self.content(g, table[p // size])[p % size]
                assert slot == states[p], f"group {g}, position {p}: other KV than its own"

    # The parts of a step.

    def _introduce(self, plan: StepPlan) -> None:
        for key in plan.released:
            assert key in self.known, "forgotten, but never in a slot"
            del self.known[key]
        for sequence in plan.new_slots:
            assert sequence.key not in self.known, "in a slot twice"
            self.known[sequence.key] = sequence

    def _move_blocks(self, plan: StepPlan) -> None:
        """Out, copies, clearing, in."""
        self._check_moves(plan)
        out = [(m, self._pools[m.group].blocks[m.source]) for m in plan.swap_out]
        copies = [(m, self._pools[m.group].blocks[m.source]) for m in plan.copies]
        for pool in (*self._pools, *self._hosts):
            if pool is not None:
                pool.poison()
        self._fill(self._hosts, out)
        self._fill(self._pools, copies)
        for group, block_id in plan.cleared:
            assert block_id != NULL_BLOCK, "the null block is cleared"
            self._pools[group].blocks[block_id] = [CLEARED] * self.block_size
        hosts = self._hosts
        self._fill(self._pools, [(m, hosts[m.group].blocks[m.source]) for m in plan.swap_in])

    def _fill(
        self, pools: SequenceOf[FakePool | None], moves: list[tuple[BlockMove, Block]]
    ) -> None:
        for move, content in moves:
            pool = pools[move.group]
            assert pool is not None, "a swap without host blocks"
            assert move.target != NULL_BLOCK, "the null block is written"
            pool.blocks[move.target] = list(content)

    def _check_moves(self, plan: StepPlan) -> None:
        """Nothing is written twice, and what goes out and what comes in never meet."""
        for moves in (plan.swap_out, plan.copies, plan.swap_in):
            targets = [(m.group, m.target) for m in moves]
            assert len(targets) == len(set(targets)), "two blocks are moved to one place"
            assert all(m.source != NULL_BLOCK for m in moves), "the null block is moved"
        assert len(plan.cleared) == len(set(plan.cleared))
        device_in = {(m.group, m.target) for m in plan.swap_in}
        assert not device_in & {(m.group, m.target) for m in plan.copies}
        assert not device_in & {(m.group, m.source) for m in plan.swap_out}, "swaps meet here"
        host_in = {(m.group, m.source) for m in plan.swap_in}
        assert not host_in & {(m.group, m.target) for m in plan.swap_out}, "swaps meet there"

    def _encode(self, plan: StepPlan) -> None:
        running = [c for c in plan.chunks if c.sequence.batch_slots is not None]
        read = [output for chunk in running for output in chunk.encoder_outputs]
        for output in plan.encoder.to_compute:
            self.encoded.update(dict.fromkeys(output.block_ids, output))
        for output in read:
            found = {self.encoded[block_id].encoder_input for block_id in output.block_ids}
            assert {i.content_hash for i in found} == {output.encoder_input.content_hash}

    def _is_encoded(self, encoder_input: EncoderInput) -> bool:
        """Returns whether all blocks of an output are as they were written."""
        return any(
            output.encoder_input.content_hash == encoder_input.content_hash
            and all(self.encoded[block_id] is output for block_id in output.block_ids)
            for output in self.encoded.values()
        )

    def _work(self, plan: StepPlan) -> list[Work]:
        """Returns what is computed, in the order of the flat batch."""
        work = [
            Work(self._batch_slots.owners[batch_slot], start, start + 1)
            for batch_slot, start in zip(
                plan.decode_slots.tolist(), plan.decode_starts.tolist(), strict=True
            )
        ]
        for chunk in plan.chunks:
            assert 0 <= chunk.start < chunk.end, "nothing to compute"
            sequence = chunk.sequence if chunk.sequence.batch_slots is not None else None
            work.append(Work(sequence, chunk.start, chunk.end))
        for item in work:
            if item.sequence is not None:
                assert self.known.get(item.sequence.key) is item.sequence, "computed unannounced"
                assert item.start == item.sequence.num_computed_tokens, "a gap in what is computed"
        return work

    def _states(self, sequence: Sequence, length: int) -> tuple[int, ...]:
        """Returns the states of the first tokens in a sequence's row, drafts among them."""
        tokens = self._batch_slots.token_ids[sequence.batch_slot, :length].tolist()
        return prefix_states(
            sequence.request.root, tuple(tokens), sequence.request.spec.encoder_inputs
        )

    def _write(self, work: list[tuple[Work, Sequence]]) -> None:
        """All of a step's KV, before any of it is read."""
        written: set[tuple[int, int, int]] = set()
        for item, sequence in work:
            states = self._states(sequence, item.end)
            self._check_encoded(item, sequence)
            self._check_writable(item, sequence, work)
            for g, table in enumerate(self._batch_slots.block_tables):
                for p in range(item.start, item.end):
                    block_id = int(table[sequence.batch_slot, p // self.block_size])
                    slot = g, block_id, p % self.block_size
                    assert block_id != NULL_BLOCK, "a token without a block"
                    assert slot not in written, "two sequences write one slot"
                    written.add(slot)
                    self.content(g, block_id)[p % self.block_size] = states[p]

    def _check_writable(
        self, item: Work, sequence: Sequence, work: list[tuple[Work, Sequence]]
    ) -> None:
        """Asserts that no sequence can find what is written, and that others hold only full blocks
        of it, after which each of them computes tokens in this step."""
        size = self.block_size
        for g, (group, table) in enumerate(zip(self.groups, sequence.block_ids, strict=True)):
            for i in range(item.start // size, -(-item.end // size)):
                readers = [r for w, r in work if w.start >= (i + 1) * size and r is not sequence]
                num_readers = sum(table[i] in reader.block_ids[g] for reader in readers)
                assert group.pool._hashes[table[i]] is None, "others may find it"
                assert group.pool._ref_counts[table[i]] == 1 + num_readers, "others may read it"

    def _check_encoded(self, item: Work, sequence: Sequence) -> None:
        for wanted in sequence.request.spec.encoder_inputs:
            if wanted.start < item.end and item.start < wanted.end:
                assert self._is_encoded(wanted), "an encoder input is missing"

    def _check_reads(self, item: Work, sequence: Sequence, *, is_decode: bool) -> None:
        """Asserts that what the queries see is right, and that the blocks it is in can be read as a
        whole: of a decode up to the end of its table, since decodes are read to one width."""
        tables = [t[sequence.batch_slot].tolist() for t in self._batch_slots.block_tables]
        self.check_content(tables, self._states(sequence, item.end), item.start)
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            first = group.first_block(item.start, self.block_size)
            end = None if is_decode else -(-item.end // self.block_size)
            for block_id in table[first:end]:
                assert POISON not in self.content(g, block_id), "reads a block that was not cleared"

    # What comes out.

    def _choose(self, plan: StepPlan, work: list[Work]) -> StepResult:
        rows = [(item.sequence, p) for item in work for p in range(item.start, item.end)]
        assert len(rows) == plan.num_tokens, "the plan miscounts its tokens"
        beam_tokens, beam_scores = self._beam_candidates(plan, rows)
        endings: dict[int, str | None] = {}
        return StepResult(
            np.array(list(self._sampled(plan, rows, endings)), np.int64),
            endings=endings,
            beam_token_ids=beam_tokens,
            beam_scores=beam_scores,
            prompt_logprobs=dict(self._scored(plan, work[len(plan.decode_slots) :])),
        )

    def _state_of_row(
        self, row: tuple[Sequence | None, int], batch_slot: int, length: int
    ) -> int | None:
        sequence, position = row
        if sequence is None:
            return None
        assert (batch_slot, length) == (sequence.batch_slot, position + 1), (
            "a row of another sequence"
        )
        return self._states(sequence, length)[-1]

    def _sampled(
        self,
        plan: StepPlan,
        rows: list[tuple[Sequence | None, int]],
        endings: dict[int, str | None],
    ) -> Iterator[int]:
        columns = plan.sample_rows, plan.sample_slots, plan.sample_indices, plan.sample_lengths
        of_each = zip(*(column.tolist() for column in columns), strict=True)
        for i, (row, batch_slot, index, length) in enumerate(of_each):
            sequence, _ = rows[row]
            state = self._state_of_row(rows[row], batch_slot, length)
            token = 0 if state is None else next_token(state, index)
            if sequence is not None:
                tokens = [*self._batch_slots.token_ids[batch_slot, :length].tolist(), token]
                ending = ending_of(sequence.request, states_of(sequence.request, tokens)[-1])
                if ending is not None:
                    endings[i] = "why" if ending is FinishReason.FAILED else None
            yield token

    def _beam_candidates(
        self, plan: StepPlan, rows: list[tuple[Sequence | None, int]]
    ) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        found = []
        for row, batch_slot, length in zip(
            plan.beam_rows.tolist(),
            plan.beam_slots.tolist(),
            plan.beam_lengths.tolist(),
            strict=True,
        ):
            found.append(candidates(self._state_of_row(rows[row], batch_slot, length) or 0))
        if not found:
            return None, None
        k = plan.num_beam_candidates
        return np.stack([t[:k] for t, _ in found]), np.stack([s[:k] for _, s in found])

    def _scored(
        self, plan: StepPlan, work: list[Work]
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        for i, (chunk, item) in enumerate(zip(plan.chunks, work, strict=True)):
            if chunk.scored and item.sequence is not None:
                assert chunk.start < chunk.scored.start <= chunk.scored.stop <= chunk.end + 1
                tokens = item.sequence.token_ids
                states = self._states(item.sequence, chunk.scored.stop)
                yield (
                    i,
                    tuple(
                        TokenLogprobs(score_of(states[p - 1], int(tokens[p]))) for p in chunk.scored
                    ),
                )
