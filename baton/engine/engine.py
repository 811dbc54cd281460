"""Engine: model, KV cache and scheduler in one process, without threads or network.

    schedule -> run -> apply -> emit

is one `step()`. `generate()` steps until a list of prompts is done; servers step in a thread of
their own (`baton.engine.async_engine`).
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from baton.cluster.prefix import BlockHash
from baton.engine.assembly import (
    LoadedModel,
    LoadProgress,
    OnLoadedBytes,
    load,
    make_scheduler,
)
from baton.engine.cache.kv_pool import KvPool
from baton.engine.cache.swap_costs import CostMeter
from baton.engine.config import EngineConfig
from baton.engine.device_stream import DeviceStream, stream_of
from baton.engine.facts import EngineFacts
from baton.engine.messages import (
    Completion,
    EngineRequest,
    GenerationResult,
    MultimodalPrompt,
    SequenceUpdate,
    StepOutput,
)
from baton.engine.metering.step_times import StepClock, TimeSpent
from baton.engine.metering.work_meter import WorkDone, WorkMeter
from baton.engine.models.cuda_graphs import DecodeGraphs
from baton.engine.plugins import drafter_named
from baton.engine.pooling import pooled_output, pooled_request
from baton.engine.ranking import ranked
from baton.engine.request_check import RequestCheck, check_grammar, why_no_images
from baton.engine.runner import Launched, ModelRunner, StepMemoryError
from baton.engine.scheduler.kv.memory_report import MemoryReport
from baton.engine.scheduler.kv.pinned_blocks import Tables
from baton.engine.scheduler.scheduling.encode_jobs import EncodeJob
from baton.engine.scheduler.scheduling.plan import Float32Array, NotAhead, StepPlan
from baton.engine.scheduler.scheduling.progress import SequenceProgress, StepProgress
from baton.engine.scheduler.scheduling.scheduler_stats import SchedulerStats
from baton.engine.scheduler.sequences.prompt_lookup import DraftRequest
from baton.engine.scheduler.sequences.sequence import (
    FinishReason,
    Purpose,
    Request,
    SequenceStatus,
)
from baton.engine.updates import updates_of, updates_of_one
from baton.engine.vision.rope_positions import RopePositions
from baton.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from baton.models.encoder_input import EncoderInput
from baton.models.patched_images import PatchedImages
from baton.models.pooling import why_not
from baton.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.engine.grammar.compiler import GrammarCompiler
    from baton.engine.grammar.state import CompiledGrammar
    from baton.engine.vision.prompt_processor import PromptProcessor

logger = logging.getLogger(__name__)

Prompt = str | SequenceOf[int] | MultimodalPrompt


class Engine:
    """Inference engine for offline batches, and for `AsyncEngine`. Not thread-safe.

    Attributes:
        facts: the properties of it that never change.
        runner: computes its steps.
        drafter: proposes drafts of its sequences.
        on_planned: called after a step is planned and before it is computed.
        num_waits: steps after which none was launched ahead, by reason.
    """

    def __init__(
        self, config: EngineConfig, loaded: LoadedModel, stream: DeviceStream | None = None
    ) -> None:
        """Computes on `stream`, by default that of the model's device."""
        self.config = config
        self.info = info = loaded.info
        self.cache = loaded.cache
        self._path = loaded.path
        self._tokenizer: Any = None
        self._prompt_processor: PromptProcessor | None = None
        self._grammars = None if config.encoder_only else _grammar_compiler(loaded)
        self.device = device = loaded.device
        self._scheduler = make_scheduler(config, loaded)
        self._backend = backend = loaded.backend
        sampler = backend.sampler(config.max_num_seqs, info.vocab_size, device, info.eos_token_ids)
        graphs = None
        if not config.encoder_only:
            backend.warm_up(loaded.model, loaded.attention, sampler, loaded.cache)
            graphs = backend.graphs(loaded.model, loaded.attention)
        self.facts = _facts(config, loaded, graphs)
        self._check = RequestCheck(self.facts)
        stream = stream or stream_of(device)
        self._clock = StepClock(is_on_gpu=device.type == "cuda")
        self.runner = ModelRunner(
            loaded.model,
            loaded.attention,
            loaded.cache,
            self._scheduler.batch_slots,
            sampler,
            info.vocab_size,
            device,
            graphs=graphs,
            clock=self._clock,
            stream=stream,
            pooler=loaded.pooler,
            encoder=loaded.encoder,
            rope=_rope_positions(config, loaded),
        )
        make_drafter = drafter_named(config.drafter)
        self.drafter = make_drafter(model_path=loaded.path, vocab_size=info.vocab_size)
        self._meter = CostMeter(self._scheduler.costs, loaded.cache)
        self._work = WorkMeter()
        self._committed: list[SequenceProgress] = []
        self._leaving: set[str] = set()
        self._has_events = False
        self._is_closed = False
        self.on_planned: Callable[[], None] = lambda: None
        configured = config.async_scheduling
        self._is_async = stream.is_asynchronous if configured is None else configured
        self._ahead: tuple[StepPlan, Launched] | None = None
        self.num_waits: Counter[NotAhead] = Counter()
        self._has_failed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        on_progress: LoadProgress = lambda _phase, _fraction: None,
        on_loaded_bytes: OnLoadedBytes = lambda _loaded, _all: None,
    ) -> "Engine":
        """Loads a checkpoint: a folder with safetensors, or an id on the Hugging Face hub.

        Args:
            on_progress: called with each phase of loading and the fraction done.
            on_loaded_bytes: called with the bytes of weights loaded so far, about, and of all.

        Raises `UnsupportedModelError` or `InvalidArgumentError` with the reason.
        """
        config = config or EngineConfig()
        loaded = load(os.fspath(path), config, on_progress, on_loaded_bytes)
        on_progress("warming up", 0.95)
        engine = cls(config, loaded)
        on_progress("ready", 1.0)
        return engine

    @property
    def is_ahead(self) -> bool:
        """Whether a step is launched whose output `step` has yet to return."""
        return self._ahead is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Offline batches.

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Continues every prompt and returns the results in order. Runs requests of `add_request`
        too, as far as they get meanwhile; their updates of these steps are dropped. Steps are the
        largest, unless `max_num_tokens_with_decodes` is set.

        Args:
            prompts: texts, lists of token ids, or prompts with images (`prompt_with_images`).
            params: one for all prompts, or one each. None: greedy, 16 tokens.
        """
        every = self._params_for(prompts, params)
        requests = [
            self._request(f"generate-{i}", prompt, of_one)
            for i, (prompt, of_one) in enumerate(zip(prompts, every, strict=True))
        ]
        collected: dict[str, list[SequenceUpdate]] = {r.request_id: [] for r in requests}
        added: list[str] = []
        try:
            for request in requests:
                self.add_request(request)
                added.append(request.request_id)
            with self._largest_steps():
                self._run_to_end(collected)
        except BaseException:
            self.abort(*added)
            raise
        return [self._result(r, collected[r.request_id], prompts) for r in requests]

    def _largest_steps(self) -> AbstractContextManager[None]:
        is_limited = self.config.max_num_tokens_with_decodes is not None
        return nullcontext() if is_limited else self._scheduler.largest_steps()

    def pool(self, prompts: SequenceOf[str | SequenceOf[int]]) -> list[Float32Array]:
        """Returns the pooled output of every prompt, in order: embeddings, or outputs of the
        classification head. Raises `FailedPreconditionError` if the model has none."""
        pooling = self.info.pooling
        if pooling is None:
            raise FailedPreconditionError(why_not(self.info.name, None, "embedding"))
        requests = [
            pooled_request(f"pool-{i}", tuple(self._encode(prompt)), pooling)
            for i, prompt in enumerate(prompts)
        ]
        collected: dict[str, list[SequenceUpdate]] = {r.request_id: [] for r in requests}
        for request in requests:
            self.add_request(request)
        self._run_to_end(collected)
        return [pooled_output(pooling, collected[r.request_id], len(r.token_ids)) for r in requests]

    def _run_to_end(self, collected: dict[str, list[SequenceUpdate]]) -> None:
        """Steps until no work is left, or can be done, and collects these requests' updates. Raises
        `OverloadedError` if some of them cannot run, or the device has too little memory."""
        made_progress = True
        while self.has_work and made_progress:
            output = self.step()
            for request_id in output.failed.keys() & collected.keys():
                raise output.failed[request_id]
            for update in output.updates:
                if update.request_id in collected:
                    collected[update.request_id].append(update)
            made_progress = output.made_progress
        if any(i in self._scheduler for i in collected):
            reason = "blocks that these prompts need are kept by earlier requests; release them"
            if made_progress:
                reason = "the engine is paused and starts no new request; resume it"
            raise OverloadedError(reason)

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

    def prompt_with_images(self, text: str, images: SequenceOf[Any]) -> MultimodalPrompt:
        """Returns a prompt made by the checkpoint's tokenizer and image processor.

        Args:
            text: with the processor's image token once per image, such as "<image>", and the tokens
                that the model's chat template has around it, such as "<|vision_start|>".
            images: images of Pillow.

        Raises `FailedPreconditionError` if the model takes no images, and `InvalidArgumentError` if
        the text has another number of image tokens.
        """
        if self.info.images is None:
            raise FailedPreconditionError(why_no_images(self.info))
        if self._prompt_processor is None:
            from baton.engine.vision.prompt_processor import PromptProcessor

            self._prompt_processor = PromptProcessor(self._path, self.info.images)
            self._tokenizer = self._prompt_processor.tokenizer
        return self._prompt_processor(text, images)

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        inputs = prompt.encoder_inputs if isinstance(prompt, MultimodalPrompt) else ()
        given = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else self._encode(prompt)
        token_ids = tuple(given)
        return EngineRequest(request_id, token_ids, params, len(token_ids), encoder_inputs=inputs)

    def _encode(self, prompt: str | SequenceOf[int]) -> SequenceOf[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            from baton.engine.models.hf import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._path, trust_remote_code=False)
        return self._tokenizer

    def _result(
        self, request: EngineRequest, updates: list[SequenceUpdate], prompts: SequenceOf[Prompt]
    ) -> GenerationResult:
        decodes = self._tokenizer is not None or any(isinstance(p, str) for p in prompts)
        return GenerationResult(
            prompt_token_ids=request.token_ids,
            completions=tuple(
                self._completion(of_one, request.params, decodes=decodes)
                for of_one in ranked(updates, request.params)
            ),
            num_cached_tokens=updates[0].num_cached_tokens,
            prompt_logprobs=tuple(logprobs for u in updates for logprobs in u.prompt_logprobs),
        )

    def _completion(
        self, updates: list[SequenceUpdate], params: SamplingParams, *, decodes: bool
    ) -> Completion:
        token_ids = tuple(u.token_id for u in updates if u.token_id is not None)
        if updates[-1].failure is not None:
            raise InvalidArgumentError("sampling.grammar", updates[-1].failure)
        reason = updates[-1].finish_reason
        assert reason is not None, "a completion that has not ended"
        return Completion(
            token_ids=token_ids,
            text=self.tokenizer.decode(token_ids, skip_special_tokens=True) if decodes else None,
            finish_reason=reason,
            logprobs=tuple(u.logprobs for u in updates if u.logprobs) if params.logprobs else (),
            score=updates[-1].score,
        )

    # Online serving, step by step.

    def check(self, request: EngineRequest, grammar: "CompiledGrammar | None" = None) -> None:
        """Raises the errors of `add_request`, except for an id that is taken and for a grammar that
        is not compiled yet."""
        self._check(request)
        if grammar is not None:
            check_grammar(request, grammar)

    def check_encoder_input(self, encoder_input: EncoderInput, *, has_tensors: bool) -> None:
        """Raises `InvalidArgumentError` or `FailedPreconditionError` for an input that this engine
        could not compute. Its tensors may be missing unless `has_tensors`."""
        self._check.encoder_input(encoder_input, has_tensors=has_tensors)

    def compile_grammar(self, params: SamplingParams) -> "CompiledGrammar | None":
        """Compiles the grammar of `params` for `add_request`. May take seconds; from any thread.

        Raises `InvalidArgumentError` for a grammar that does not compile, or not in time.
        """
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise InvalidArgumentError(
                "sampling.grammar",
                "cannot be used with this model: its folder has no tokenizer.json",
            )
        return self._grammars.compile(params.grammar)

    def add_request(self, request: EngineRequest, grammar: "CompiledGrammar | None" = None) -> None:
        """Queues a request; its first update comes from a later `step`.

        Args:
            grammar: the compiled grammar; None compiles it now if the request has one.

        Raises the errors of `check`, `AlreadyExistsError` for an id that is taken, and
        `UnavailableError` after `close`.
        """
        if self._is_closed:
            raise UnavailableError("the engine is closed")
        if request.params.grammar is not None and grammar is None:
            grammar = self.compile_grammar(request.params)
        self.check(request, grammar)
        if request.request_id in self._scheduler:
            raise AlreadyExistsError(f"request {request.request_id!r} is already here")
        params = request.params
        if params.num_sequences > params.n and not params.beam_width and not params.logprobs:
            params = replace(params, logprobs=True)  # to rank them by
        self._leaving.discard(request.request_id)
        speculates = self.config.speculate if params.speculate is None else params.speculate
        can_speculate = not params.beam_width and request.purpose is not Purpose.PREFILL
        self._scheduler.add(
            Request(
                request_id=request.request_id,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                params=params,
                stop_token_ids=frozenset(params.stop_token_ids),
                eos_token_ids=frozenset() if params.ignore_eos else self.info.eos_token_ids,
                root=self.info.namespace.root(request.salt, request.adapter),
                block_hashes=request.block_hashes,
                purpose=request.purpose,
                kv_source=request.kv_source,
                num_external_tokens=request.num_external_tokens,
                sequence_index=request.sequence_index,
                outputs=request.outputs,
                priority=request.priority,
                arrival_time=request.arrival_time,
                first_token_deadline=request.first_token_deadline,
                return_cost=request.return_cost,
                encoder_inputs=request.encoder_inputs,
                speculates=speculates and can_speculate and self.config.max_drafts > 0,
                grammar=grammar,
            )
        )

    def commit_external(
        self, request_id: str, token_id: int | None, logprob: float | None = None
    ) -> None:
        """Commits the KV of all the request's tokens, which has arrived; `token_id` follows them.
        None: the first token of each of its sequences is chosen here."""
        progress = self._scheduler.commit_external(request_id, token_id, logprob)
        if progress is not None and progress.finish_reason is not None:
            self._committed.append(progress)

    def fail_external(self, request_id: str) -> None:
        """Computes a request here whose external KV will not arrive. Idempotent."""
        self._scheduler.fail_external(request_id)

    def suspend(self, request_id: str) -> None:
        """Suspends a request of one sequence once it runs and all but its last token is computed.
        Its update lists the blocks, which stay until `release`. Idempotent; does nothing for a
        request that is not here, or of several sequences."""
        if self._scheduler.may_suspend(request_id):
            self._leaving.add(request_id)

    def pin(self, name: str, hashes: SequenceOf[BlockHash]) -> Tables:
        """Pins the longest cached run of these blocks until `unpin`; returns a table per group."""
        return self._scheduler.pin(name, hashes)

    def unpin(self, name: str) -> None:
        """Releases pinned blocks. Idempotent."""
        self._scheduler.unpin(name)

    def encode(self, number: int, job: EncodeJob, *, only_cached: bool = False) -> None:
        """Holds the output of an input until `release_output`, and computes it unless it is cached.
        The answer, a `HeldOutput`, comes from the step after which the output is there.

        Args:
            number: names the output; new.
            job: its input needs no tensors with `only_cached`.

        Raises the errors of `check_encoder_input`, and `NotFoundError` with `only_cached` if the
        output is not cached.
        """
        jobs, encoder_input = self._scheduler.encode_jobs, job.encoder_input
        self.check_encoder_input(encoder_input, has_tensors=not only_cached)
        jobs.check_length(encoder_input)
        if only_cached and encoder_input.content_hash not in jobs.cache:
            raise NotFoundError("the output of this encoder input is not cached here")
        jobs.encode(number, job)

    def expect_output(self, number: int, job: EncodeJob) -> None:
        """Expects an output of another worker, until `commit_output` or `release_output`: meanwhile
        no input of this content is computed here. The answer, a `HeldOutput`, has the blocks to
        fill; none if the output is cached, and then nothing is expected any more.

        Raises as `encode` for an input that could not be computed here.
        """
        self.check_encoder_input(job.encoder_input, has_tensors=False)
        self._scheduler.encode_jobs.check_length(job.encoder_input)
        self._scheduler.encode_jobs.expect(number, job)

    def commit_output(self, number: int) -> None:
        """Caches an expected output, whose blocks have been filled, without a holder. Does nothing
        if it was released."""
        self._has_events |= self._scheduler.encode_jobs.commit(number)

    def release_output(self, number: int) -> None:
        """Releases an output, in any state; one that is expected is computed here when a sequence
        needs it. Idempotent."""
        self._scheduler.encode_jobs.release(number)

    def abort(self, *request_ids: str) -> None:
        """Ends requests and frees their blocks; no update follows. Idempotent."""
        self._committed = [p for p in self._committed if p.request.request_id not in request_ids]
        self._leaving.difference_update(request_ids)
        self._scheduler.abort(*request_ids)

    def end_sequence(
        self, request_id: str, index: int, reason: FinishReason = FinishReason.ABORTED
    ) -> None:
        """Ends one of a request's sequences and frees its own blocks; its last update says
        `reason`, and the others continue. Idempotent; does nothing before the sequences have
        forked, nor where they are ranked."""
        progress = self._scheduler.end_sequence(request_id, index, reason)
        if progress is not None:
            self._committed.append(progress)

    def release(self, request_id: str) -> None:
        """Frees the blocks of a finished `PREFILL` or a suspended sequence. Idempotent."""
        self._scheduler.release(request_id)

    def pause(self) -> None:
        """Starts no new request from the next step on; requests that have begun continue, and new
        ones are accepted and wait. Idempotent."""
        self._scheduler.pause()

    def resume(self) -> None:
        """Starts waiting requests again. Idempotent."""
        self._scheduler.resume()

    @property
    def has_work(self) -> bool:
        waits = bool(self._committed) or self._has_events or self._ahead is not None
        return waits or self._scheduler.has_work

    def step(self) -> StepOutput:
        """Schedules, computes and applies one step. With async scheduling, launches the next step
        before it waits for this one's tokens, so that the device is not idle."""
        start = time.perf_counter()
        plan, launched = self._ahead or self._launch()
        launched.choose()
        self._ahead = self._launch_ahead(plan, launched)
        try:
            with self._clock.sample():
                result = launched.fetch()
        except StepMemoryError as error:
            self._has_failed = self._ahead is not None
            return self._failed(plan, error, start)
        self._has_failed = False
        seconds = time.perf_counter() - start
        self._meter.note_step(plan.num_tokens, seconds)
        self._work.note_step(plan, seconds)
        progress = self._scheduler.apply(plan, result)
        progress, self._committed = self._with_committed(progress), []
        updates = updates_of(progress, result)
        for stopped in self._suspend():
            updates += updates_of_one(stopped, result)
        self._has_events = False
        return StepOutput(
            updates=tuple(updates),
            external=plan.external,
            cache_events=self._scheduler.drain_events(),
            made_progress=plan.made_progress,
            times=self._clock.note_step(start),
            preempted=plan.preempted,
            held_outputs=plan.encoder.held,
        )

    def _failed(self, plan: StepPlan, error: StepMemoryError, started: float) -> StepOutput:
        """Ends the requests of a step that has no result; the others continue."""
        message = (
            f"a step of {plan.num_tokens} tokens needs more memory than the device has left: lower "
            f"--gpu-memory-utilization or --max-num-batched-tokens ({error})"
        )
        ended = [request.request_id for request in self._scheduler.fail(plan)]
        self._leaving.difference_update(ended)
        logger.warning("%s; it ends %s", message, ", ".join(ended) or "no request")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return StepOutput(
            updates=(),
            external=plan.external,
            cache_events=self._scheduler.drain_events(),
            made_progress=True,
            times=self._clock.note_step(started),
            preempted=plan.preempted,
            held_outputs=plan.encoder.held,
            failed={request_id: OverloadedError(message) for request_id in ended},
        )

    def _launch(self) -> tuple[StepPlan, Launched]:
        self._draft()
        plan = self._scheduler.schedule()
        self.on_planned()
        return plan, self.runner.launch(plan)

    def _launch_ahead(self, plan: StepPlan, launched: Launched) -> tuple[StepPlan, Launched] | None:
        """Launches the step after `plan` if it need not wait for the tokens of `launched`."""
        if not self._is_async:
            return None
        ahead = self._plan_ahead(plan)
        if isinstance(ahead, NotAhead):
            self.num_waits[ahead] += 1
            return None
        self.on_planned()
        return ahead, self.runner.launch(ahead, launched)

    def _plan_ahead(self, plan: StepPlan) -> StepPlan | NotAhead:
        if self._has_failed:
            return NotAhead.FAILURE  # a step after one without a result has none
        if any(map(self._is_suspendable, self._leaving)):
            return NotAhead.SUSPENSION  # `_suspend` needs a moment without a step launched ahead
        return self._scheduler.schedule_ahead(plan)

    def _is_suspendable(self, request_id: str) -> bool:
        """Returns whether a request runs and the KV of all but its last token is computed."""
        request = self._scheduler.requests.get(request_id)
        return request is not None and any(
            s.status is SequenceStatus.RUNNING and s.num_tokens == s.num_computed_tokens + 1
            for s in request.sequences
        )

    def _draft(self) -> None:
        """Proposes draft tokens for the sequences that speculate."""
        sequences = [s for s in self._scheduler.speculating if s.num_drafts_allowed]
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
            self._scheduler.set_drafts(sequence, drafts)

    def _with_committed(self, progress: StepProgress) -> StepProgress:
        return StepProgress(progress.decoded, self._committed + progress.others)

    @property
    def encoder_pool(self) -> KvPool | None:
        """Pool of encoder outputs: a block is `block_size` rows, K of one head of one layer without
        V. None for a model without an encoder."""
        return self.cache.encoder_pool

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens that one step computes."""
        return self.facts.max_num_batched_tokens

    @property
    def work_done(self) -> WorkDone:
        """Tokens computed since the start, and the seconds they took. From any thread."""
        return self._work.done

    @property
    def time_spent(self) -> TimeSpent:
        """Seconds of all steps since the start, by phase. From any thread."""
        return self._clock.spent

    @property
    def num_late_compilations(self) -> int:
        """Kernels compiled after the warm-up, each of which stalled a step. From any thread."""
        return self._backend.num_late_compilations

    def _suspend(self) -> list[SequenceProgress]:
        """Suspends the sequences that `suspend` named, as far as possible now."""
        stopped = []
        for request_id in tuple(self._leaving):
            progress = None if self._ahead is not None else self._scheduler.suspend(request_id)
            if progress is not None:
                stopped.append(progress)
            if progress is not None or not self._scheduler.may_suspend(request_id):
                self._leaving.remove(request_id)
        return stopped

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def memory_report(self) -> MemoryReport:
        """Returns the usage of the KV blocks, with sharing and waste."""
        return self._scheduler.memory_report()

    def flush_cache(self, hashes: SequenceOf[BlockHash] | None = None) -> int:
        """Drops cached blocks with these chain hashes, and encoder outputs with these content
        hashes; None: all of both. The next step's `cache_events` say so. Sequences that hold such
        blocks or outputs keep them.

        Returns how many blocks were cached.
        """
        self._has_events = True
        if hashes is None:
            return self._scheduler.reset_prefix_cache()
        return self._scheduler.evict(hashes)

    def close(self) -> None:
        """Ends all requests, frees their blocks and starts none any more. Also the end of a `with`
        block. Idempotent."""
        self._is_closed = True
        self._ahead, self._committed = None, []
        self._leaving.clear()
        self._scheduler.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    def check_integrity(self) -> None:
        """Asserts that tables, counts and queues agree. For tests."""
        self._scheduler.check_integrity()


def _facts(config: EngineConfig, loaded: LoadedModel, graphs: DecodeGraphs | None) -> EngineFacts:
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
        num_graphs=0 if graphs is None else graphs.num_graphs,
        num_expected_graphs=loaded.backend.num_expected_graphs,
    )


def _rope_positions(config: EngineConfig, loaded: LoadedModel) -> RopePositions | None:
    """Returns the rotary positions of a model with M-RoPE that takes images."""
    images = loaded.info.images
    if not isinstance(images, PatchedImages) or not loaded.model.has_mrope:
        return None
    return RopePositions(config.max_num_seqs, images)


def _grammar_compiler(loaded: LoadedModel) -> "GrammarCompiler | None":
    """Returns a grammar compiler, or None for a model without `tokenizer.json`."""
    if not (Path(loaded.path) / "tokenizer.json").is_file():
        return None
    from baton.engine.grammar.compiler import GrammarCompiler

    return GrammarCompiler(loaded.path, loaded.info.vocab_size, loaded.info.eos_token_ids)
