"""Scheduler cost: microseconds per running sequence and step, beside the model's own time.

Pure decode over two cache groups, one of them with a window, as hybrid models have them. In each
step one sequence in eight changes: one in sixteen needs a block, one in thirty-two ends by a stop
token, and one in thirty-two starts, its KV coming from elsewhere. Timed are all that the engine's
thinking half does about it (add, schedule, commit of external KV, apply with the sampled ids) and
the building of the runner's input tensors, for attention as a CPU computes it. Not timed: the
model, the sampler, and making messages of the tokens.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from baton.engine.executor.attention.in_place_attention import InPlaceBatch
from baton.engine.executor.attention.interface import Attention, LayerAttention
from baton.engine.executor.attention.mask_rule import MaskRule
from baton.engine.executor.backend import TorchBackend
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.device_stream import HostStream
from baton.engine.executor.runner import ModelRunner
from baton.engine.executor.sampling.sampler import Sampler
from baton.engine.executor.token_head import TokenHead
from baton.engine.metering.step_times import StepClock
from baton.engine.request import EngineRequest, KvSource
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.plan import StepPlan, StepResult
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request
from baton.sampling import SamplingParams
from bench.report import Row, interleaved

BLOCK_SIZE = 16
WINDOW = 128
VOCAB_SIZE = 32_000
STOP = 7
NUM_STEPS = 200
AIM_MICROSECONDS = {16: 4.0, 64: 2.0, 256: 2.0, 1024: 2.0}


def run(repeats: int) -> list[Row]:
    """Microseconds per running sequence and step, at each number of sequences."""
    loads = {size: Load(size) for size in AIM_MICROSECONDS}
    contenders: dict[str, Callable[[], float]] = {str(n): load.measure for n, load in loads.items()}
    figures = interleaved(contenders, repeats)
    return [
        Row(
            f"{size} running sequences",
            figures[str(size)],
            "us / sequence / step",
            "the aim",
            aim,
            aim / figures[str(size)],
            1.0,
        )
        for size, aim in AIM_MICROSECONDS.items()
    ] + [
        Row(
            "growth, 1,024 against 16 sequences",
            figures["1024"],
            "us / sequence / step",
            "16 running sequences",
            figures["16"],
            figures["16"] / figures["1024"],
            None,
        )
    ]


class _NoModel:
    """Stands where the model would; it is not called."""

    execution = "none"
    has_mrope = False

    def use(self, paged: Attention | None) -> None:
        pass

    def forward(self, *_: object) -> torch.Tensor:
        raise AssertionError("the benchmark computes nothing")


class Load:
    """A scheduler at a steady number of sequences."""

    def __init__(self, num_sequences: int) -> None:
        self._num_sequences = num_sequences
        device = torch.device("cpu")
        shape = KvShape(1, 1, 1)
        layouts, places = plan_groups([shape, shape], [None, WINDOW], torch.float32, BLOCK_SIZE)
        num_blocks = 24 * num_sequences
        pools = [KvPool(layout, num_blocks, device) for layout in layouts]
        cache = KvCache(pools, [], places)
        config = SchedulerConfig(
            max_num_batched_tokens=num_sequences + 1,
            max_num_seqs=num_sequences,
            block_size=BLOCK_SIZE,
            max_model_len=4096,
            vocab_size=VOCAB_SIZE,
        )
        groups = [CacheGroup(BlockPool(num_blocks), layout.window) for layout in layouts]
        self.scheduler = Scheduler(config, groups)
        layers = [LayerAttention(1.0, MaskRule(window)) for window in (None, WINDOW)]
        sampler = Sampler(num_sequences, VOCAB_SIZE, device, frozenset())
        self._runner = ModelRunner(
            _NoModel(),
            TorchBackend(layers, uses_c_kernels=True).attention(cache),
            cache,
            self.scheduler.batch_slots,
            TokenHead(sampler, VOCAB_SIZE, self.scheduler.batch_slots, HostStream()),
            HostStream(),
            StepClock(),
        )
        self._random = np.random.default_rng(num_sequences)
        self._params = SamplingParams(max_tokens=2048, stop_token_ids=(STOP,))
        self._num_added = 0
        self._owed = 0.0
        self._add([self._request() for _ in range(num_sequences)])
        for _ in range(4 * BLOCK_SIZE):  # until starts and ends are spread over the steps
            self.step()

    def measure(self) -> float:
        """The mean of some steps."""
        total, num_rows = 0.0, 0
        for _ in range(NUM_STEPS):
            seconds, plan = self.step()
            total, num_rows = total + seconds, num_rows + len(plan.decode_slots)
        return total / num_rows * 1e6

    def step(self) -> tuple[float, StepPlan]:
        """Returns the seconds that one step took, and its plan.

        As in the engine, a step without tokens to compute makes no tensors.
        """
        self._owed += self._num_sequences / 32
        num_ending = int(self._owed)
        self._owed -= num_ending
        requests = [self._request() for _ in range(num_ending)]
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan.num_tokens:
            batch = self._runner.inputs(plan).batch
            if isinstance(batch, InPlaceBatch):  # which divides the work for its first layer
                batch.work(0, 1)
        planned = time.perf_counter() - start
        assert plan.is_pure_decode, "something else than decodes was planned"
        result = StepResult(self._tokens(plan, num_ending))
        start = time.perf_counter()
        self.scheduler.apply(plan, result)
        for allocation in plan.external:
            self.scheduler.commit_external(allocation.request_id, 1)
        self._add(requests)
        return planned + time.perf_counter() - start, plan

    def _tokens(
        self, plan: StepPlan, num_ending: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        tokens = self._random.integers(STOP + 1, VOCAB_SIZE, len(plan.sample_rows))
        if len(tokens):
            tokens[self._random.permutation(len(tokens))[:num_ending]] = STOP
        return tokens

    def _add(self, requests: list[Request]) -> None:
        self.scheduler.add(*requests)

    def _request(self) -> Request:
        """A prompt of 64 to 79 tokens, whose KV another worker has."""
        self._num_added += 1
        length = int(self._random.integers(64, 80))
        token_ids = tuple(self._random.integers(STOP + 1, VOCAB_SIZE, length).tolist())
        spec = EngineRequest(
            str(self._num_added), token_ids, self._params, length, kv_source=KvSource.EXTERNAL
        )
        return Request(spec=spec, root=bytes(16))
