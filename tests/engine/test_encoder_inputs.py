"""Encoder inputs through scheduler and runner: what an encoder computes is there when the tokens
that it fills are computed, and is let go when they are passed."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from baton.engine.executor.attention.interface import Attention, StepBatch
from baton.engine.executor.attention.torch_attention import TorchAttention
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.device_stream import HostStream
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.runner import ModelRunner
from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.executor.token_head import TokenHead
from baton.engine.executor.vision.vision_encoder import placed_inputs
from baton.engine.metering.step_times import StepClock
from baton.engine.request import EngineRequest
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.engine.scheduler.plan import StepPlan
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.batch_slots import BatchSlots
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request
from baton.errors import InvalidArgumentError
from baton.models.images.encoder_input import EncoderInput
from baton.sampling import SamplingParams

CPU = torch.device("cpu")
VOCAB_SIZE = 50
BLOCK_SIZE = 4
CACHE_TOKENS = 24
BUDGET = 16


class FakeEncoder:
    """Writes outputs to blocks, within their number."""

    def __init__(self) -> None:
        self.blocks: dict[int, EncoderOutput] = {}  # the latest in each
        self.num_encoded = 0

    def encode(self, outputs: Sequence[EncoderOutput]) -> None:
        for output in outputs:
            self.blocks.update(dict.fromkeys(output.block_ids, output))
            assert len(output.block_ids) * BLOCK_SIZE >= output.encoder_input.length
            self.num_encoded += 1
        assert all(1 <= block_id <= CACHE_TOKENS // BLOCK_SIZE for block_id in self.blocks)
        assert sum(output.encoder_input.length for output in outputs) <= BUDGET

    def features(self, plan: StepPlan) -> EncoderFeatures | None:
        """Returns the row of each token in its input in place of features."""
        placed = list(placed_inputs(plan))
        for output in (p.output for p in placed):
            (found,) = {self.blocks[block_id] for block_id in output.block_ids}
            assert found.encoder_input.content_hash == output.encoder_input.content_hash
        if not placed:
            return None
        rows = np.concatenate([np.arange(p.end - p.begin) for p in placed])
        starts = np.repeat([p.row for p in placed], [p.end - p.begin for p in placed])
        begins = np.repeat([p.begin for p in placed], [p.end - p.begin for p in placed])
        return EncoderFeatures(torch.from_numpy(rows + starts), torch.from_numpy(rows + begins))

    def last_keys(self, plan: StepPlan) -> None:
        """Every token sees up to its own."""


class FakeModel:
    """Asserts that the tokens of encoder inputs, and only these, have their features."""

    def __init__(self) -> None:
        self.batch_slots: BatchSlots | None = None
        self.num_filled = 0

    def use(self, paged: Attention | None) -> None:
        pass

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
        features: EncoderFeatures | None = None,
    ) -> torch.Tensor:
        assert self.batch_slots is not None
        expected = {}
        places = zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)
        for row, (batch_slot, position) in enumerate(places):
            owner = self.batch_slots.owners[batch_slot]
            assert owner is not None
            for item in owner.request.spec.encoder_inputs:
                if item.start <= position < item.end:
                    expected[row] = position - item.start
        filled = features and dict(
            zip(features.rows.tolist(), features.values.tolist(), strict=True)
        )
        assert (filled or {}) == expected
        self.num_filled += len(expected)
        return torch.nn.functional.one_hot(logit_rows * 0 + 1, VOCAB_SIZE).float()


class Machine:
    """A real scheduler, runner and sampler around the two fakes."""

    def __init__(self, num_blocks: int = 200, **config: int | bool) -> None:
        self.encoder = FakeEncoder()
        self.model = FakeModel()
        layouts, places = plan_groups([KvShape(1, 4, 4)], [None], torch.float32, BLOCK_SIZE)
        cache = KvCache([KvPool(layouts[0], num_blocks, CPU)], [], places)
        settings = SchedulerConfig(
            **{
                "max_num_batched_tokens": 11,
                "max_num_seqs": 4,
                "block_size": BLOCK_SIZE,
                "max_model_len": 200,
                "vocab_size": VOCAB_SIZE,
                "encoder_budget": BUDGET,
                "encoder_cache_tokens": CACHE_TOKENS,
                **config,
            }  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(settings, [CacheGroup(BlockPool(num_blocks))])
        sampler = Sampler(4, VOCAB_SIZE, CPU, frozenset())
        batch_slots = self.model.batch_slots = self.scheduler.batch_slots
        self.runner = ModelRunner(
            self.model,
            TorchAttention(cache),
            cache,
            batch_slots,
            TokenHead(sampler, VOCAB_SIZE, batch_slots, HostStream()),
            HostStream(),
            StepClock(),
            encoder=self.encoder,
        )
        self.finished: list[str] = []

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                return
            plan = self.scheduler.schedule()
            progress = self.scheduler.apply(plan, self.runner.run(plan))
            self.scheduler.check_integrity()
            decoded = [s for s in progress.decoded.sequences if s.finish_reason]
            self.finished += [s.request.request_id for s in decoded]
            self.finished += [p.request.request_id for p in progress.others if p.finish_reason]
        raise AssertionError("does not come to an end")


def request(
    request_id: str, inputs: list[EncoderInput], length: int, tokens: int = 3, seed: int = 0
) -> Request:
    source = random.Random(seed)
    spec = EngineRequest(
        request_id,
        tuple(source.randrange(VOCAB_SIZE) for _ in range(length)),
        SamplingParams(max_tokens=tokens),
        length,
        encoder_inputs=tuple(inputs),
    )
    return Request(spec=spec, root=bytes(16))


@pytest.mark.parametrize("num_blocks", [200, 22])
@pytest.mark.parametrize("caching", [True, False])
def test_encoder_inputs_are_computed_before_their_tokens(num_blocks, caching, rng):
    machine = Machine(num_blocks, prefix_caching=caching)
    for i in range(12):
        inputs, position = [], 0
        for _ in range(rng.randint(0, 3)):
            start = position + rng.randint(0, 6)
            content = rng.randint(0, 5)
            inputs.append(EncoderInput(bytes([content]) * 16, start, 4 + 2 * content))
            position = inputs[-1].end
        machine.scheduler.add(
            request(
                str(i), inputs, max(1, position + rng.randint(0, 9)), rng.randint(1, 20), seed=i
            )
        )
    machine.run()
    assert sorted(machine.finished) == sorted(map(str, range(12)))
    assert machine.model.num_filled > 0
    assert machine.scheduler.stats().num_held_blocks == 0


def test_encoder_computes_equal_content_once():
    machine = Machine(prefix_caching=False)
    item = EncoderInput(b"i" * 16, 2, 10)
    for name in "ab":
        machine.scheduler.add(request(name, [item], 20, seed=1))
    machine.run()
    assert machine.encoder.num_encoded == 1


def test_prompts_differing_in_an_image_share_the_prefix_before():
    machine = Machine()
    machine.scheduler.add(request("a", [EncoderInput(b"1" * 16, 9, 4)], 24))
    machine.run()
    hits = []
    for content in (b"1", b"2"):
        machine.scheduler.add(request("b", [EncoderInput(content * 16, 9, 4)], 24))
        before = machine.scheduler.stats().num_hit_tokens
        machine.run()
        hits.append(machine.scheduler.stats().num_hit_tokens - before)
    assert hits == [23, 8]  # all but the last token; the blocks before the image


def test_cached_prompt_needs_no_encoder():
    machine = Machine()
    for name in "ab":
        machine.scheduler.add(request(name, [EncoderInput(b"1" * 16, 1, 6)], 24))
        machine.run()
    assert machine.encoder.num_encoded == 1


def test_scheduler_rejects_an_input_beyond_the_encoder_budget():
    machine = Machine()
    with pytest.raises(InvalidArgumentError, match="17 tokens long; the encoder's budget"):
        machine.scheduler.add(request("a", [EncoderInput(b"1" * 16, 1, 17)], 24))
    assert not machine.scheduler.has_work


def test_last_token_of_an_image_that_ends_a_prompt_is_filled():
    machine = Machine(max_num_batched_tokens=4)
    machine.scheduler.add(request("a", [EncoderInput(b"1" * 16, 8, 1)], 9))
    machine.run()
    assert machine.model.num_filled == 1
