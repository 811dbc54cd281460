"""One engine: model, cache and scheduler in one process, without threads or network.

    schedule -> run -> apply -> emit

is one `step()`. `generate()` steps until a list of prompts is done; servers step in a thread of
their own (`baton.engine.async_engine`).
"""

import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.cluster.prefix import PrefixNamespace
from baton.engine import loader
from baton.engine.config import EngineConfig
from baton.engine.core.block_pool import BlockPool, CacheEvents
from baton.engine.core.plan import ExternalAllocation
from baton.engine.core.scheduler import Scheduler, SchedulerConfig, SchedulerStats, SequenceProgress
from baton.engine.core.sequence import FinishReason, KvSource, Purpose, Sequence
from baton.engine.fused_model import FusedModel, can_fuse
from baton.engine.hf import without_progress_bars
from baton.engine.kv_pool import KvPool, plan_layout
from baton.engine.runner import DecoderModel, ModelRunner
from baton.engine.transformers_model import AttentionHook, TransformersModel, probe
from baton.errors import AlreadyExistsError, InvalidArgumentError, OverloadedError
from baton.models import DESCRIPTION, WEIGHTS, checkpoint_folder
from baton.sampling import SamplingParams, check_length, check_token_ids

Prompt = str | SequenceOf[int]
LoadProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What others must know of a loaded model."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    fingerprint: bytes
    namespace: PrefixNamespace


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to compute.

    Attributes:
        token_ids: the prompt and any output generated so far.
        num_prompt_tokens: how many of them are the prompt.
        purpose: `PREFILL` ends after one token and keeps its blocks until `release`.
        kv_source: `EXTERNAL` allocates blocks and waits for `commit_external`.
        salt: sequences with unequal salts share no prefix.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    num_prompt_tokens: int
    purpose: Purpose = Purpose.GENERATE
    kv_source: KvSource = KvSource.LOCAL
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one step did for one sequence.

    Attributes:
        position: of `token_id` in the output, from 0.
        num_computed_tokens: KV of [0, this) is in the blocks.
        block_ids: the blocks, for a `PREFILL` sequence; else empty.
    """

    request_id: str
    token_id: int | None
    position: int
    logprob: float | None
    finish_reason: FinishReason | None
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything that one step has to tell."""

    updates: tuple[SequenceUpdate, ...]
    external: tuple[ExternalAllocation, ...]
    cache_events: CacheEvents
    num_tokens: int

    @property
    def made_progress(self) -> bool:
        """Whether another step could do more; if not, only a command can change that."""
        return self.num_tokens > 0 or bool(self.external)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished continuation.

    Attributes:
        text: the new tokens as text; None when no prompt was text and no tokenizer was asked for.
        logprobs: one per token, in nats, if asked for; else empty.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    num_cached_tokens: int


class Engine:
    """Not thread-safe: one thread at a time calls it."""

    def __init__(
        self, config: EngineConfig, info: ModelInfo, model: DecoderModel, pool: KvPool, path: str
    ) -> None:
        self.config = config
        self.info = info
        self.pool = pool
        self._path = path
        self._tokenizer: Any = None
        device = loader.resolve_device(config.device)
        blocks = BlockPool(pool.num_blocks)
        self._blocks = blocks
        self._scheduler = Scheduler(
            SchedulerConfig(
                config.tokens_per_step(device.type),
                config.max_num_seqs,
                config.block_size,
                config.prefix_caching,
            ),
            blocks,
        )
        self._runner = ModelRunner(model, pool, device)
        self._committed: list[SequenceProgress] = []
        self._flushed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        on_progress: LoadProgress = lambda _phase, _fraction: None,
    ) -> "Engine":
        """Loads a checkpoint: a folder with safetensors, or the id of one on the hub.

        Args:
            on_progress: told each phase of loading and the fraction done.

        Raises `UnsupportedModelError` or `InvalidArgumentError` with a sentence that says why.
        """
        config = config or EngineConfig()
        path = os.fspath(path)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        on_progress("reading configuration", 0.0)
        folder = str(checkpoint_folder(path, (*DESCRIPTION, *WEIGHTS)))
        hf_config = loader.load_config(folder)
        max_len = loader.max_model_len(hf_config, config)
        hook = AttentionHook(max_len)
        on_progress("loading weights", 0.1)
        with without_progress_bars():
            hf_model = loader.load_model(folder, hf_config, config, hook.name)
        on_progress("probing layers", 0.7)
        layers = probe(hf_model, hook)
        model: DecoderModel
        if can_fuse(hf_model):
            fused = FusedModel(hf_model, [layer.attention for layer in layers], max_len)
            model, execution = fused, fused.execution
        else:
            model, execution = TransformersModel(hf_model, hook), TransformersModel.execution
        fingerprint = loader.fingerprint(hf_config, hf_model, execution)
        on_progress("allocating the KV cache", 0.9)
        layout = plan_layout([layer.shape for layer in layers], hf_model.dtype, config.block_size)
        pool = KvPool(layout, _num_blocks(config, layout.block_bytes), hf_model.device)
        info = ModelInfo(
            name=Path(path).name,
            architecture=type(hf_model).__name__,
            vocab_size=hf_config.get_text_config().vocab_size,
            max_model_len=max_len,
            eos_token_ids=loader.eos_token_ids(hf_config, hf_model),
            fingerprint=fingerprint,
            namespace=PrefixNamespace(
                fingerprint, loader.tokenizer_hash(folder), layout.dtype, config.block_size
            ),
        )
        on_progress("ready", 1.0)
        return cls(config, info, model, pool, folder)

    # Batch use.

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Continues every prompt and returns the results in order.

        Args:
            prompts: texts or lists of token ids.
            params: one for all prompts, or one each. None: greedy, 16 tokens.
        """
        every = self._params_for(prompts, params)
        token_ids = [tuple(self._encode(p)) for p in prompts]
        requests = [
            EngineRequest(f"generate-{i}", ids, p, len(ids))
            for i, (ids, p) in enumerate(zip(token_ids, every, strict=True))
        ]
        collected: dict[str, list[SequenceUpdate]] = {r.request_id: [] for r in requests}
        for i, request in enumerate(requests):
            try:
                self.add_request(request)
            except Exception:
                for earlier in requests[:i]:
                    self.abort(earlier.request_id)
                raise
        while self.has_work:
            output = self.step()
            if not output.made_progress and any(i in self._scheduler for i in collected):
                raise OverloadedError(
                    "the blocks that these prompts need are kept by earlier requests; release them"
                )
            for update in output.updates:
                if update.request_id in collected:
                    collected[update.request_id].append(update)
        return [self._result(r, collected[r.request_id], prompts) for r in requests]

    def _params_for(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidArgumentError(
                "params", f"has {len(params)} entries for {len(prompts)} prompts"
            )
        return list(params)

    def _encode(self, prompt: Prompt) -> SequenceOf[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            from baton.engine.hf import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=False)
        return self._tokenizer

    def _result(
        self, request: EngineRequest, updates: list[SequenceUpdate], prompts: SequenceOf[Prompt]
    ) -> GenerationResult:
        token_ids = tuple(u.token_id for u in updates if u.token_id is not None)
        reason = updates[-1].finish_reason
        assert reason is not None
        decodes = self._tokenizer is not None or any(isinstance(p, str) for p in prompts)
        return GenerationResult(
            prompt_token_ids=request.token_ids,
            token_ids=token_ids,
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True) if decodes else None,
            finish_reason=reason,
            logprobs=tuple(u.logprob or 0.0 for u in updates if u.token_id is not None)
            if request.params.logprobs
            else (),
            num_cached_tokens=updates[0].num_cached_tokens,
        )

    # Step by step.

    def check(self, request: EngineRequest) -> None:
        """Raises what `add_request` would, except for an id that is taken."""
        check_token_ids(request.token_ids, self.info.vocab_size, "token_ids")
        if not 1 <= request.num_prompt_tokens <= len(request.token_ids):
            raise InvalidArgumentError(
                "num_prompt_tokens",
                f"is {request.num_prompt_tokens}; must be in [1, {len(request.token_ids)}]",
            )
        check_length(request.num_prompt_tokens, request.params.max_tokens, self.info.max_model_len)
        if len(request.token_ids) - request.num_prompt_tokens >= request.params.max_tokens:
            raise InvalidArgumentError(
                "sampling.max_tokens", "is already reached by the output given"
            )
        needed = self.num_blocks_for(request)
        if needed > self.pool.num_blocks:
            raise InvalidArgumentError(
                "token_ids",
                f"with what is to follow, they need {needed} KV blocks; the pool has "
                f"{self.pool.num_blocks}: ask for fewer tokens, or enlarge it (--num-blocks)",
            )

    def num_blocks_for(self, request: EngineRequest) -> int:
        """Blocks the request can grow to. The KV of the last token is never computed."""
        total = request.num_prompt_tokens + request.params.max_tokens - 1
        if request.purpose is Purpose.PREFILL:
            total = len(request.token_ids)
        return -(-total // self.config.block_size)

    def add_request(self, request: EngineRequest) -> None:
        """Queues a sequence; its first update comes from a later `step`."""
        self.check(request)
        if request.request_id in self._scheduler:
            raise AlreadyExistsError(f"request {request.request_id!r} is already here")
        eos = frozenset() if request.params.ignore_eos else self.info.eos_token_ids
        self._scheduler.add(
            Sequence(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                stop_token_ids=frozenset(request.params.stop_token_ids),
                eos_token_ids=eos,
                root=self.info.namespace.root(request.salt),
                purpose=request.purpose,
                kv_source=request.kv_source,
            )
        )

    def commit_external(self, request_id: str, token_id: int) -> None:
        """The KV of all the sequence's tokens has arrived; `token_id` follows them."""
        progress = self._scheduler.commit_external(request_id, token_id)
        if progress is not None and progress.sequence.finish_reason is not None:
            self._committed.append(progress)

    def abort(self, request_id: str) -> None:
        """Ends a sequence and frees its blocks; no update follows. Idempotent."""
        self._committed = [p for p in self._committed if p.sequence.request_id != request_id]
        self._scheduler.abort(request_id)

    def release(self, request_id: str) -> None:
        """Frees the blocks of a finished `PREFILL` sequence. Idempotent."""
        self._scheduler.release(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._committed) or self._flushed

    def step(self) -> StepOutput:
        """Schedules, computes and books one step."""
        plan = self._scheduler.schedule()
        result = self._runner.run(plan)
        progress = self._scheduler.apply(plan, result)
        progress, self._committed = self._committed + progress, []
        self._flushed = False
        return StepOutput(
            updates=tuple(map(_update, progress)),
            external=plan.external,
            cache_events=self._blocks.drain_events(),
            num_tokens=plan.num_tokens,
        )

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def flush_cache(self) -> int:
        """Forgets every cached prefix; the next step's `cache_events` say so.

        Returns how many blocks were findable.
        """
        self._flushed = True
        return self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Asserts that tables, counts and queues agree. For tests."""
        self._scheduler.check_integrity()


def _update(progress: SequenceProgress) -> SequenceUpdate:
    sequence = progress.sequence
    return SequenceUpdate(
        request_id=sequence.request_id,
        token_id=progress.token_id,
        position=sequence.num_output_tokens - 1,
        logprob=progress.logprob,
        finish_reason=sequence.finish_reason,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        block_ids=tuple(sequence.block_ids) if sequence.purpose is Purpose.PREFILL else (),
    )


def _num_blocks(config: EngineConfig, block_bytes: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    fitting = config.kv_cache_bytes // block_bytes
    if fitting == 0:
        raise InvalidArgumentError(
            "kv_cache_bytes", f"is {config.kv_cache_bytes}; one block takes {block_bytes}"
        )
    return fitting
