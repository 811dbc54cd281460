"""Block tables of a prefill, as the scheduler reports them: enough to stream its blocks from.
Those that a claimant needs keep what was computed into them, from the moment they are filled to
the end of the lease."""

from collections.abc import Iterator
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.request import EngineRequest, Purpose
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.plan import StepPlan, StepResult
from baton.engine.scheduler.progress import SequenceProgress
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request
from baton.sampling import SamplingParams
from baton_kvtransfer.lease.block_range import BlockRange

MAX_LEN = 64
MAX_SEQS = 3

Windows = list[int | None]


class Pools:
    """The content of every slot: the first token of the prompt it was computed for, and where."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int, int], tuple[int, int]] = {}

    def run(self, plan: StepPlan, scheduler: Scheduler) -> StepResult:
        """Writes what the plan computes."""
        size = scheduler.config.block_size
        for move in plan.copies:
            for offset in range(size):
                source = self._slots[move.group, move.source, offset]
                self._slots[move.group, move.target, offset] = source
        for chunk in plan.chunks:
            sequence = chunk.sequence
            for group, tables in enumerate(scheduler.batch_slots.block_tables):
                for position in range(chunk.start, chunk.end):
                    block_id = int(tables[sequence.batch_slot, position // size])
                    assert block_id != NULL_BLOCK, "computed into no block"
                    content = int(sequence.tokens[0]), position
                    self._slots[group, block_id, position % size] = content
        return StepResult(np.ones(len(plan.sample_rows), np.int64))

    def tokens_in(self, group: int, block_id: int, count: int) -> Iterator[tuple[int, int]]:
        """Returns the tokens in the first `count` slots of a block."""
        assert block_id != NULL_BLOCK, "given back, or never there"
        return (self._slots[group, block_id, offset] for offset in range(count))


class Source:
    """One prefill as its lease would see it."""

    def __init__(self, request: Request, windows: Windows, block_size: int) -> None:
        self._first_token = request.spec.token_ids[0]
        self._blocks = BlockRange(len(request.spec.token_ids), block_size)
        self._due = [self._blocks.due(window, 0) for window in windows]
        self._tables: tuple[tuple[int, ...], ...] = ()
        self._num_filled = 0
        self.is_complete = False

    def take(self, progress: SequenceProgress) -> None:
        self._tables = progress.block_ids
        self._num_filled = progress.num_computed_tokens // self._blocks.block_size
        if progress.token_ids:
            self._num_filled, self.is_complete = self._blocks.num_blocks, True
            assert progress.num_computed_tokens == self._blocks.num_tokens
            assert {len(table) for table in self._tables} == {self._blocks.num_blocks}

    def check(self, pools: Pools) -> None:
        """Everything that could be read now is what a claimant expects."""
        size, num_tokens = self._blocks.block_size, self._blocks.num_tokens
        for group, (due, table) in enumerate(zip(self._due, self._tables, strict=False)):
            for i in range(due.start, self._num_filled):
                positions = range(i * size, min((i + 1) * size, num_tokens))
                found = pools.tokens_in(group, table[i], len(positions))
                assert list(found) == [(self._first_token, p) for p in positions]


def prefill(name: int, first_token: int, num_tokens: int) -> Request:
    """Prompts that begin alike are alike, so that later ones find what earlier ones left."""
    params, tokens = SamplingParams(max_tokens=MAX_LEN), (first_token,) * num_tokens
    spec = EngineRequest(str(name), tokens, params, num_tokens, Purpose.PREFILL)
    return Request(spec=spec, root=bytes(16))


@given(
    prompts=st.lists(
        st.tuples(st.integers(2, 3), st.integers(1, MAX_LEN - 1)), min_size=1, max_size=8
    ),
    windows=st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=3),
    block_size=st.integers(1, 5),
    chunk=st.integers(MAX_SEQS, 40),
    num_spare=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_prefill_keeps_content_of_blocks_claimant_needs(
    prompts, windows, block_size, chunk, num_spare, seed
):
    config = SchedulerConfig(
        max_num_batched_tokens=chunk,
        max_num_seqs=MAX_SEQS,
        block_size=block_size,
        max_model_len=MAX_LEN,
        vocab_size=8,
    )
    chance = Random(seed)
    num_blocks = -(-MAX_LEN // block_size) + num_spare
    scheduler = Scheduler(config, [CacheGroup(BlockPool(num_blocks), w) for w in windows])
    pools = Pools()
    waiting = [prefill(i, *prompt) for i, prompt in enumerate(prompts)]
    sources = {r.request_id: Source(r, windows, block_size) for r in waiting}
    leased: dict[str, Source] = {}
    num_released = 0
    while num_released < len(sources):
        if waiting and chance.random() < 0.4:
            request = waiting.pop(0)
            scheduler.add(request)
            leased[request.request_id] = sources[request.request_id]
        plan = scheduler.schedule()
        for progress in scheduler.apply(plan, pools.run(plan, scheduler)).others:
            leased[progress.request.request_id].take(progress)
        for source in leased.values():
            source.check(pools)
        done = [name for name, source in leased.items() if source.is_complete]
        if done and (not plan.num_tokens or chance.random() < 0.4):
            scheduler.release(done[0])
            del leased[done[0]]
            num_released += 1
    assert scheduler.stats().num_held_blocks == 0
