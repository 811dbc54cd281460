"""Host time of an engine's steps on a device that computes nothing, and steps launched ahead of it.

256 sequences of 256 tokens at most, half of which may end by a stop token; a new request follows
each that has ended. Some loads share long prefixes, which recorded steps attend once. Timed is
all that the engine does in a step as on a GPU: schedule, fill the inputs of a recorded decode step
(block tables, attention plan) or make those of one with prompts, apply, and make messages of the
tokens. Not timed: adding requests, committing external KV. Calls of CUDA cost nothing here. Seconds
are those of the thread's processor, which others do not share.
"""

import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from baton.cluster.prefix import PrefixNamespace
from baton.engine.config import EngineConfig
from baton.engine.core.assembly import LoadedModel
from baton.engine.core.engine_core import EngineCore
from baton.engine.executor.attention.interface import Attention
from baton.engine.executor.attention.static_batch import StaticTritonBatch
from baton.engine.executor.attention.triton_attention import TritonAttention
from baton.engine.executor.backend import Backend, TorchBackend
from baton.engine.executor.cache.kv_layout import KvShape, plan_groups
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.device_stream import HostStream
from baton.engine.executor.models.cuda_graphs import DecodeGraphs, Step, capture_sizes
from baton.engine.executor.runner import DecoderModel
from baton.engine.facts import ModelInfo
from baton.engine.llm import LLM
from baton.engine.outputs import StepOutput
from baton.engine.request import EngineRequest, KvSource
from baton.sampling import SamplingParams
from bench.report import Row, interleaved

NUM_SEQUENCES = 256
NUM_TOKENS = 256
PROMPT_TOKENS = 64
PREFIX_TOKENS = 1024
BLOCK_SIZE = 16
MAX_LENGTH = 2048
VOCAB_SIZE = 64
STOP = 7
# Steps in which one row of so many gets the stop token.
STOP_EVERY = 400
NUM_STEPS = 512
NUM_BLOCKS = NUM_SEQUENCES * (PROMPT_TOKENS + NUM_TOKENS) // BLOCK_SIZE * 2
KV_HEADS = 8
CPU = torch.device("cpu")
AIM_SHARE = 0.95
AIM_MILLISECONDS = 0.4

Windows = list[int | None]
FULL: Windows = [None]


def run(repeats: int) -> list[Row]:
    """Measures the share of steps launched ahead, and milliseconds per step, by load."""
    loads = {
        "prompts computed here": Load(KvSource.LOCAL),
        "KV from elsewhere": Load(KvSource.EXTERNAL),
        "one prefix": Load(KvSource.EXTERNAL, num_prefixes=1),
        "16 prefixes": Load(KvSource.EXTERNAL, num_prefixes=16),
    }
    contenders: dict[str, Callable[[], float]] = {n: load.measure for n, load in loads.items()}
    figures = interleaved(contenders, repeats)
    rows = []
    for name, load in loads.items():
        share, milliseconds = load.share_ahead, figures[name]
        rows += [
            Row(
                f"launched ahead, {name}",
                share,
                "share of steps",
                "the aim",
                AIM_SHARE,
                share / AIM_SHARE,
                1.0,
            ),
            Row(
                f"host time, {name}",
                milliseconds,
                "ms / step",
                "the aim",
                AIM_MILLISECONDS,
                AIM_MILLISECONDS / milliseconds,
                1.0,
            ),
        ]
    return rows


class NullStream(HostStream):
    """`DeviceStream` of a device that is done at once, and told everything as a GPU is."""

    is_asynchronous = True


class NullRecorder:
    """`Recorder` of steps that are not run again."""

    def record(self, step: Step) -> Step:
        out = step()
        return lambda: out


class NullModel:
    """Model that computes nothing; chooses the stop token now and then."""

    execution = "none"
    has_mrope = False

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        tokens = generator.integers(STOP + 1, VOCAB_SIZE, 64 * NUM_SEQUENCES)
        tokens[generator.random(len(tokens)) < 1 / STOP_EVERY] = STOP
        self._logits = torch.nn.functional.one_hot(torch.from_numpy(tokens), VOCAB_SIZE).float()
        self._at = 0

    def use(self, paged: Attention | None) -> None:
        pass

    def forward(
        self, _ids: Any, _positions: Any, _batch: Any, logit_rows: torch.Tensor, *_: object
    ) -> torch.Tensor:
        return self.next_logits(len(logit_rows))

    def next_logits(self, num_rows: int) -> torch.Tensor:
        """Returns logits, `[num_rows, VOCAB_SIZE]`."""
        self._at = (self._at + 997) % (len(self._logits) - num_rows)
        return self._logits[self._at : self._at + num_rows]


class NullGraphs(DecodeGraphs):
    """Recorded decode steps whose inputs are filled, and that compute nothing."""

    def __init__(
        self,
        model: NullModel,
        attention: TritonAttention,
        make_batch: Callable[[TritonAttention, int, int], StaticTritonBatch] = StaticTritonBatch,
    ) -> None:
        sizes = capture_sizes(NUM_SEQUENCES, attention.max_decode_tokens)
        batch = make_batch(attention, sizes[-1], MAX_LENGTH // BLOCK_SIZE + 1)
        super().__init__(model.forward, batch, sizes, CPU, NullRecorder())
        self._model = model

    def run(self, *inputs: object) -> torch.Tensor | None:
        logits = super().run(*inputs)  # type: ignore[arg-type]
        return None if logits is None else self._model.next_logits(len(logits))


class NullBackend(TorchBackend):
    """Backend of `NullModel`, with graphs."""

    def graphs(self, model: DecoderModel, attention: Attention) -> DecodeGraphs:
        return NullGraphs(cast("NullModel", model), cast("TritonAttention", attention))


def null_engine(
    backend: Backend | None = None,
    num_blocks: int = NUM_BLOCKS,
    windows: Windows = FULL,
    max_drafts: int = 0,
    kv_heads: int = KV_HEADS,
) -> LLM:
    """Returns an engine that computes nothing, with one layer for each of `windows`."""
    shapes = [KvShape(kv_heads, 64, 64)] * len(windows)
    layouts, places = plan_groups(shapes, windows, torch.bfloat16, BLOCK_SIZE)
    cache = KvCache([KvPool(layout, num_blocks, CPU) for layout in layouts], [], places)
    info = ModelInfo(
        name="null",
        architecture="null",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_LENGTH,
        eos_token_ids=frozenset(),
        content=bytes(16),
        fingerprint=bytes(32),
        namespace=PrefixNamespace(bytes(32), bytes(32), "bfloat16", BLOCK_SIZE),
    )
    attention = TritonAttention(
        cache,
        [8 * kv_heads] * len(windows),
        torch.bfloat16,
        MAX_LENGTH,
        deterministic=False,
        max_decode_tokens=1 + max_drafts,
    )
    backend = backend or NullBackend([], uses_c_kernels=False)
    loaded = LoadedModel(info, NullModel(), backend, attention, cache, CPU, "")
    config = EngineConfig(
        device="cpu",
        max_num_seqs=NUM_SEQUENCES,
        max_num_batched_tokens=2048,
        block_size=BLOCK_SIZE,
        max_drafts=max_drafts,
    )
    return LLM(EngineCore(config, loaded, NullStream()))


class Load:
    """An engine at a steady number of sequences, whose prompts' KV has one source.

    `num_prefixes`: prompts begin with these, in turns, before tokens of their own.
    """

    def __init__(self, source: KvSource, num_prefixes: int = 0) -> None:
        torch.set_num_threads(1)
        self._engine = null_engine()
        self._source = source
        self._random = np.random.default_rng(1)
        self._prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(num_prefixes)] or [()]
        self._num_added = self._num_here = 0
        for number in range(NUM_SEQUENCES):  # so that endings are spread over the steps
            self._add(1 + number % NUM_TOKENS)
        for _ in range(NUM_TOKENS):
            self._step()
        self._first = self._counts

    def measure(self) -> float:
        """Returns the mean milliseconds of some steps."""
        return sum(self._step() for _ in range(NUM_STEPS)) / NUM_STEPS * 1e3

    @property
    def share_ahead(self) -> float:
        """Share of the steps measured that were launched ahead."""
        (num_ahead, num_steps), (ahead_before, steps_before) = self._counts, self._first
        return (num_ahead - ahead_before) / (num_steps - steps_before)

    @property
    def _counts(self) -> tuple[int, int]:
        return (
            self._engine.core.scheduler.stats().num_steps_ahead,
            self._engine.core.reading().work_done.num_steps,
        )

    def _step(self) -> float:
        """Returns the seconds that one step took."""
        while self._num_here < NUM_SEQUENCES:
            self._add(NUM_TOKENS)
        start = time.thread_time()
        output = self._engine.core.step()
        seconds = time.thread_time() - start
        self._note(output)
        return seconds

    def _note(self, output: StepOutput) -> None:
        for allocation in output.external:
            self._engine.core.scheduler.commit_external(allocation.request_id, STOP + 1)
        self._num_here -= sum(update.finish_reason is not None for update in output.updates)

    def _add(self, max_tokens: int) -> None:
        self._num_added += 1
        self._num_here += 1
        prefix = self._prefixes[self._num_added % len(self._prefixes)]
        prompt = prefix + self._tokens(PROMPT_TOKENS)
        stops = (STOP,) if self._num_added % 2 else ()
        self._engine.core.add(
            EngineRequest(
                str(self._num_added),
                prompt,
                SamplingParams(max_tokens=max_tokens + 1, stop_token_ids=stops),
                len(prompt),
                kv_source=self._source,
            )
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.integers(STOP + 1, VOCAB_SIZE, count).tolist())
