"""Engine core: model, KV cache and scheduler in one thread, without network.

    schedule -> launch -> fetch -> apply

is one `step()`. `LLM` steps until a list of prompts is done; servers step in a thread or a process
of their own (`EngineLoop`), which runs commands between two steps.
"""

import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from baton.engine.config import EngineConfig
from baton.engine.core.assembly import (
    LoadedModel,
    LoadProgress,
    OnLoadedBytes,
    load,
    make_scheduler,
)
from baton.engine.core.reports import EngineReading
from baton.engine.core.request_check import RequestCheck, check_grammar
from baton.engine.core.updates import updates_of
from baton.engine.executor.cache.swap_costs import CostMeter
from baton.engine.executor.device_stream import DeviceStream, stream_of
from baton.engine.executor.grammar.masks import SLOW_MASK_S
from baton.engine.executor.models.cuda_graphs import NO_GRAPHS, Graphs
from baton.engine.executor.pooler import PoolingHead
from baton.engine.executor.runner import Head, Launched, ModelRunner, StepMemoryError
from baton.engine.executor.token_head import TokenHead
from baton.engine.facts import EngineFacts
from baton.engine.metering.step_times import StepClock
from baton.engine.metering.work_meter import WorkMeter
from baton.engine.outputs import SequenceUpdate, StepOutput
from baton.engine.plugins import drafter_named
from baton.engine.request import EngineRequest, Purpose
from baton.engine.scheduler.plan import NotAhead, StepPlan
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.engine.scheduler.sequences.prompt_lookup import DraftRequest
from baton.engine.scheduler.sequences.sequence import Request
from baton.errors import (
    AlreadyExistsError,
    BatonError,
    InvalidArgumentError,
    NonFiniteError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.models.images.encoder_input import EncoderInput

if TYPE_CHECKING:
    from baton.engine.executor.grammar.compiler import GrammarCompiler
    from baton.engine.executor.grammar.state import RequestGrammar

logger = logging.getLogger(__name__)

OnPlanned = Callable[[], None]

_MAX_PREPARED = 256
"""Compiled grammars whose requests have not come. One that is dropped is compiled again."""


def _nothing() -> None:
    return None


class EngineCore:
    """Engine core, for `LLM` and for `EngineClient`. Not thread-safe.

    Attributes:
        facts: the properties of it that never change.
        cache: its KV pools.
        scheduler: owns its requests and blocks.
        runner: computes its steps.
        drafter: proposes drafts of its sequences.
        num_waits: steps after which none was launched ahead, by reason.
        slow_mask_s: CPU seconds of a grammar's mask from which the sequence's next one is computed
            beside the steps.
    """

    slow_mask_s: ClassVar = SLOW_MASK_S

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, stream: DeviceStream | None = None
    ) -> None:
        """Computes on `stream`, by default that of the model's device."""
        self.config = config
        self.path = loaded.path
        self.cache = loaded.cache
        self.device = device = loaded.device
        self.scheduler = make_scheduler(config, loaded)
        self._grammars = None if config.encoder_only else _grammar_compiler(loaded)
        self._backend = backend = loaded.backend
        info = loaded.info
        sampler = backend.sampler(config.max_num_seqs, info.vocab_size, device, info.eos_token_ids)
        graphs = NO_GRAPHS
        if not config.encoder_only:
            backend.warm_up(loaded.model, loaded.attention, sampler, loaded.cache)
            graphs = backend.graphs(loaded.model, loaded.attention)
        self.facts = _facts(config, loaded, graphs)
        self._check = RequestCheck(self.facts)
        stream = stream or stream_of(device)
        self._clock = StepClock(is_on_gpu=device.type == "cuda")
        batch_slots = self.scheduler.batch_slots
        head: Head
        if loaded.pooler is None:
            head = TokenHead(sampler, info.vocab_size, batch_slots, stream, self.slow_mask_s)
        else:
            head = PoolingHead(loaded.pooler, stream)
        self.runner = ModelRunner(
            loaded.model,
            loaded.attention,
            loaded.cache,
            batch_slots,
            head,
            stream,
            self._clock,
            encoder=loaded.encoder,
            positions=loaded.positions,
            graphs=graphs,
        )
        make_drafter = drafter_named(config.drafter)
        self.drafter = make_drafter(model_path=loaded.path, vocab_size=info.vocab_size)
        self._costs = CostMeter(self.scheduler.costs, loaded.cache)
        self._work = WorkMeter()
        configured = config.async_scheduling
        self._is_async = stream.is_asynchronous if configured is None else configured
        self._ahead: tuple[StepPlan, Launched] | None = None
        self.num_waits: Counter[NotAhead] = Counter()
        self._has_failed = False
        self._is_closed = False
        self._idle_since: float | None = None
        self._prepared: OrderedDict[int, RequestGrammar] = OrderedDict()

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        on_progress: LoadProgress = lambda _phase, _fraction: None,
        on_loaded_bytes: OnLoadedBytes = lambda _loaded, _all: None,
    ) -> "EngineCore":
        """Loads a checkpoint: a folder with safetensors, or an id on the Hugging Face hub.

        Args:
            on_progress: called with each phase of loading and the fraction done.
            on_loaded_bytes: called with the bytes of weights loaded so far, about, and of all.

        Raises `UnsupportedModelError` or `InvalidArgumentError` with the reason.
        """
        config = config or EngineConfig()
        loaded = load(os.fspath(path), config, on_progress, on_loaded_bytes)
        on_progress("warming up", 0.95)
        core = cls(config, loaded)
        on_progress("ready", 1.0)
        return core

    # Between two steps.

    def check(self, request: EngineRequest, grammar: "RequestGrammar | None" = None) -> None:
        """Raises the errors of `add`, except for an id that is taken and for a grammar that is not
        compiled yet."""
        self._check(request)
        if grammar is not None:
            check_grammar(request, grammar)

    def check_encoder_input(self, encoder_input: EncoderInput, *, has_tensors: bool) -> None:
        """Raises `InvalidArgumentError` or `FailedPreconditionError` for an input that this engine
        could not compute. Its tensors may be missing unless `has_tensors`."""
        self._check.encoder_input(encoder_input, has_tensors=has_tensors)

    def compile_grammar(self, request: EngineRequest) -> "RequestGrammar | None":
        """Compiles the grammar of a request for `add`. May take seconds; from any thread.

        Raises `InvalidArgumentError` for a grammar that does not compile, or not in time.
        """
        grammar = request.params.grammar
        if grammar is None:
            return None
        if self._grammars is None:
            raise InvalidArgumentError(
                "sampling.grammar",
                "cannot be used with this model: its folder has no tokenizer.json",
            )
        compiled = self._grammars.compile(grammar, request.salt, request.tenant)
        return compiled.for_request(self.config.max_grammar_s)

    def has_grammar(self, request: EngineRequest) -> bool:
        """Returns whether the request's grammar, or its refusal, is cached. From any thread."""
        grammar = request.params.grammar
        return (
            grammar is None
            or self._grammars is None
            or self._grammars.is_cached(grammar, request.salt)
        )

    def add(self, request: EngineRequest, grammar: "RequestGrammar | None" = None) -> None:
        """Queues a request; its first update comes from a later `step`.

        Args:
            grammar: the compiled grammar; None compiles it now if the request has one.

        Raises the errors of `check`, `AlreadyExistsError` for an id that is taken, and
        `UnavailableError` after `close`.
        """
        if self._is_closed:
            raise UnavailableError("the engine is closed")
        params, info = request.params, self.facts.info
        if params.grammar is not None and grammar is None:
            grammar = self.compile_grammar(request)
        self.check(request, grammar)
        if request.request_id in self.scheduler:
            raise AlreadyExistsError(f"request {request.request_id!r} is already here")
        if params.num_sequences > params.n and not params.beam_width and not params.logprobs:
            request = replace(request, params=replace(params, logprobs=True))  # to rank them by
        self.scheduler.add(
            Request(
                spec=request,
                root=info.namespace.root(request.salt, request.adapter),
                eos_token_ids=frozenset() if params.ignore_eos else info.eos_token_ids,
                speculates=self._speculates(request),
                grammar=grammar,
            )
        )

    def prepare_grammar(self, number: int, request: EngineRequest) -> None:
        """Compiles the grammar of a request that will follow, and checks the output that the
        request has, for `take_grammar` of this number. From any thread; raises as
        `compile_grammar`."""
        grammar = self.compile_grammar(request)
        if grammar is not None:
            check_grammar(request, grammar)
            self._prepared[number] = grammar
        while len(self._prepared) > _MAX_PREPARED:
            self._prepared.popitem(last=False)

    def take_grammar(self, number: int | None) -> "RequestGrammar | None":
        """Returns a prepared grammar, once; None if there is none of this number (any more)."""
        return None if number is None else self._prepared.pop(number, None)

    def _speculates(self, request: EngineRequest) -> bool:
        params = request.params
        wants = self.config.speculate if params.speculate is None else params.speculate
        can = not params.beam_width and request.purpose is not Purpose.PREFILL
        return wants and can and self.config.max_drafts > 0

    def encode(self, number: int, job: EncodeJob, *, only_cached: bool = False) -> None:
        """Holds the output of an input until `EncodeJobs.release`, and computes it unless it is
        cached. The answer, a `HeldOutput`, comes from the step after which the output is there.

        Args:
            number: names the output; new.
            job: its input needs no tensors with `only_cached`.

        Raises the errors of `check_encoder_input`, and `NotFoundError` with `only_cached` if the
        output is not cached.
        """
        jobs, encoder_input = self.scheduler.encode_jobs, job.encoder_input
        self.check_encoder_input(encoder_input, has_tensors=not only_cached)
        jobs.check_length(encoder_input)
        if only_cached and encoder_input.content_hash not in jobs.cache:
            raise NotFoundError("the output of this encoder input is not cached here")
        jobs.encode(number, job)

    def expect_output(self, number: int, job: EncodeJob) -> None:
        """Expects an output of another worker, until `EncodeJobs.commit` or `release`: meanwhile no
        input of this content is computed here. The answer, a `HeldOutput`, has the blocks to fill;
        none if the output is cached, and then nothing is expected any more.

        Raises as `encode` for an input that could not be computed here.
        """
        self.check_encoder_input(job.encoder_input, has_tensors=False)
        self.scheduler.encode_jobs.check_length(job.encoder_input)
        self.scheduler.encode_jobs.expect(number, job)

    def close(self) -> None:
        """Ends all requests, frees their blocks and starts none any more. Idempotent."""
        self._is_closed, self._ahead = True, None
        self.scheduler.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    # The step.

    @property
    def has_work(self) -> bool:
        scheduler = self.scheduler
        return self._ahead is not None or scheduler.has_work or scheduler.has_events

    @property
    def is_ahead(self) -> bool:
        """Whether a step is launched whose output `step` has yet to return."""
        return self._ahead is not None

    def step(self, on_planned: OnPlanned = _nothing) -> StepOutput:
        """Schedules, computes and applies one step. With async scheduling, launches the next step
        before it waits for this one's tokens, so that the device is not idle.

        Args:
            on_planned: called after a step is planned and before it is computed.
        """
        start = time.perf_counter()
        plan, launched = self._ahead or self._launch(on_planned)
        launched.choose()
        self._ahead = self._launch_ahead(plan, launched, on_planned)
        try:
            with self._clock.sample():
                result = launched.fetch()
        except StepMemoryError as error:
            self._has_failed = self._ahead is not None
            return self._output(plan, start, failed=self._fail(plan, error))
        self._has_failed = False
        seconds = time.perf_counter() - start
        self._costs.note_step(plan.num_tokens, seconds)
        self._work.note_step(plan, seconds)
        progress = self.scheduler.apply(plan, result)
        failed = self._non_finite(progress.non_finite) if progress.non_finite else None
        return self._output(plan, start, updates_of(progress, result), failed)

    def _output(
        self,
        plan: StepPlan,
        started: float,
        updates: Iterable[SequenceUpdate] = (),
        failed: Mapping[str, BatonError] | None = None,
    ) -> StepOutput:
        return StepOutput(
            updates=tuple(updates),
            external=plan.external,
            cache_events=self.scheduler.drain_events(),
            made_progress=plan.made_progress or failed is not None,
            times=self._clock.note_step(started),
            preempted=plan.preempted,
            held_outputs=plan.encoder.held,
            failed=failed or {},
        )

    def _fail(self, plan: StepPlan, error: StepMemoryError) -> dict[str, BatonError]:
        """Ends the requests of a step that has no result; the others continue. Returns the error of
        each."""
        message = (
            f"a step of {plan.num_tokens} tokens needs more memory than the device has left: lower "
            f"--gpu-memory-utilization or --max-num-batched-tokens ({error})"
        )
        ended = [request.request_id for request in self.scheduler.fail(plan)]
        logger.warning("%s; it ends %s", message, ", ".join(ended) or "no request")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {request_id: OverloadedError(message) for request_id in ended}

    def _non_finite(self, positions: Mapping[str, int]) -> dict[str, BatonError]:
        """Returns the errors of requests that a step has ended since their logits are not finite,
        and logs each."""
        errors: dict[str, BatonError] = {}
        for request_id, position in positions.items():
            message = (
                f"request {request_id} has NaN or infinite logits at position {position}; expected "
                "finite ones. Try it with --dtype float32 or bfloat16; if it passes on another "
                "worker, check this one's device"
            )
            logger.error("%s", message)
            errors[request_id] = NonFiniteError(message)
        return errors

    def _launch(self, on_planned: OnPlanned) -> tuple[StepPlan, Launched]:
        self._draft()
        plan = self.scheduler.schedule()
        on_planned()
        return plan, self.runner.launch(plan)

    def _launch_ahead(
        self, plan: StepPlan, launched: Launched, on_planned: OnPlanned
    ) -> tuple[StepPlan, Launched] | None:
        """Launches the step after `plan` if it need not wait for the tokens of `launched`."""
        if not self._is_async:
            return None
        # A step after one without a result has none.
        ahead = NotAhead.FAILURE if self._has_failed else self._plan_ahead(plan, launched)
        if isinstance(ahead, NotAhead):
            self.num_waits[ahead] += 1
            return None
        on_planned()
        return ahead, self.runner.launch(ahead, launched)

    def _plan_ahead(self, plan: StepPlan, launched: Launched) -> StepPlan | NotAhead:
        return NotAhead.GRAMMAR if launched.has_late else self.scheduler.schedule_ahead(plan)

    def _draft(self) -> None:
        """Proposes draft tokens for the sequences that speculate."""
        sequences = [s for s in self.scheduler.speculating if s.num_drafts_allowed]
        if not sequences:
            return
        most = self.config.max_drafts
        requests = [
            DraftRequest(
                f"{s.request.request_id}.{s.index}", s.token_ids, min(s.num_drafts_allowed, most)
            )
            for s in sequences
        ]
        for sequence, drafts in zip(sequences, self.drafter.propose(requests), strict=True):
            self.scheduler.set_drafts(sequence, drafts)

    def reading(self) -> EngineReading:
        """Returns the counts and meters. Call in the engine's thread, between two steps or in
        `on_planned`: elsewhere a step may be changing them."""
        stats = self.scheduler.stats()
        if not stats.is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.time()
        return EngineReading(
            stats,
            self._work.done,
            self._clock.spent,
            self._backend.num_late_compilations,
            self._idle_since,
        )


def _facts(config: EngineConfig, loaded: LoadedModel, graphs: Graphs) -> EngineFacts:
    cache, limits = loaded.cache, loaded.encoder_limits
    return EngineFacts(
        info=loaded.info,
        device=str(loaded.device),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.tokens_per_step(loaded.device.type),
        layouts=cache.layouts,
        num_blocks=tuple(pool.num_blocks for pool in cache.pools),
        num_host_blocks=tuple(pool.num_blocks for pool in cache.host_pools),
        encoder_budget=limits.budget,
        encoder_cache_tokens=limits.cache_tokens,
        uncut_image_tokens=limits.uncut_tokens,
        encoder_layout=None if cache.encoder_pool is None else cache.encoder_pool.layout,
        num_encoder_blocks=limits.num_blocks,
        encoder_only=config.encoder_only,
        num_graphs=graphs.num_graphs,
        num_expected_graphs=loaded.backend.num_expected_graphs,
    )


def _grammar_compiler(loaded: LoadedModel) -> "GrammarCompiler | None":
    """Returns a grammar compiler, or None for a model without `tokenizer.json`."""
    if not (Path(loaded.path) / "tokenizer.json").is_file():
        return None
    from baton.engine.executor.grammar.compiler import GrammarCompiler

    return GrammarCompiler(loaded.path, loaded.info.vocab_size, loaded.info.eos_token_ids)
