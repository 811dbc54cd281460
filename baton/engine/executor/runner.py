"""Model runner: moves blocks, builds the flat batch, runs the model, samples. Decides nothing."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, RaggedBatch, StepBatch
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.device import is_out_of_memory
from baton.engine.executor.device_stream import DeviceStream, Launch, stream_of, uploader
from baton.engine.executor.grammar.masks import Allowed, GrammarMasks
from baton.engine.executor.models.cuda_graphs import DecodeGraphs
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.executor.pooler import Pooler
from baton.engine.executor.sampling.sampler import Choice, DeviceScores, Sampler, Scores, score
from baton.engine.executor.vision.rope_positions import RopePositions
from baton.engine.metering.step_times import StepClock
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.engine.scheduler.kv.memory_operations import BlockMove
from baton.engine.scheduler.scheduling.plan import (
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, Int64Array
from baton.engine.scheduler.sequences.sequence import Sequence


class DecoderModel(Protocol):
    """Decoder model over a flat batch that writes K and V to the cache.

    Attributes:
        execution: names the implementation and its arrangement of K and V.
        has_mrope: whether rotary positions have three dimensions.
    """

    execution: str
    has_mrope: bool

    def use(self, paged: Attention | None) -> None:
        """Sets the attention over the paged KV cache; None releases the last one, and its cache."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
        features: EncoderFeatures | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of the model for one step.

    Attributes:
        token_ids: `[num_tokens]`, without those that the step before is choosing.
        positions: `[num_tokens]`; `[3, num_tokens]` with M-RoPE, for tokens of images.
        logit_rows: `[num_rows]`, tokens whose logits are needed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    batch: StepBatch
    logit_rows: torch.Tensor


class Encoder(Protocol):
    """Encoder of multimodal inputs, and the blocks of their outputs."""

    def encode(self, outputs: SequenceOf[EncoderOutput]) -> None:
        """Computes the outputs of a step, which differ in content, into their blocks. The runner
        calls it again after a lack of memory."""
        ...

    def features(self, plan: StepPlan) -> EncoderFeatures | None:
        """Returns the outputs for the tokens that a plan computes; None if an encoder fills none of
        them."""
        ...

    def last_keys(self, plan: StepPlan) -> Int64Array | None:
        """Returns the last position that each token of a plan sees, as `RaggedBatch.last_keys`."""
        ...


@dataclass(frozen=True, slots=True)
class _Computed:
    """Results of a step, all but `token_ids` on their way to the host.

    Attributes:
        logits: `[num_logits, vocab_size]` on the device, if later work chooses tokens of them.
        token_ids: `[num_rows]` on the device, for the step after; None if the step chooses none.
        has_grammar: whether a grammar restricted any of the tokens.
        beams: candidates, scores and, if requested, log-probabilities, `[num_rows, k]` each.
        scores: of prompt tokens, by the index of their chunk.
        pooled: indices of ranges, and what they add to the pooled outputs, `[num_ranges, width]`.
        failure: why there are no results: the device had too little memory.
    """

    logits: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    choice: Choice | None = None
    has_grammar: bool = False
    beams: tuple[torch.Tensor, ...] = ()
    scores: tuple[tuple[int, DeviceScores], ...] = ()
    pooled: tuple[tuple[int, ...], torch.Tensor] | None = None
    failure: str | None = None


class StepMemoryError(Exception):
    """Lack of device memory for a step's inputs, forward or sampling. Its block moves are done."""


class Launched:
    """Step that is launched on the device, without waiting for its tokens.

    If its choice of tokens reads earlier ones on the host, only the forward is, until `choose`.
    """

    def __init__(
        self,
        launch: Launch[_Computed],
        result: Callable[[_Computed], StepResult],
        choice: Callable[[Launch[_Computed]], Launch[_Computed]] | None,
    ) -> None:
        self._launch = launch
        self._result = result
        self._choice = choice

    def choose(self) -> None:
        """Launches the choice of tokens, once those of the step before are applied. Idempotent."""
        if self._choice is not None:
            self._launch, self._choice = self._choice(self._launch), None

    @property
    def failure(self) -> str | None:
        """Reason why the step has no result, for work that is launched after it."""
        return self._launch.value.failure

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens on the device, `[num_rows]`, for work that is launched after `choose`."""
        token_ids = self._launch.value.token_ids
        assert token_ids is not None, "a step after one without tokens"
        return token_ids

    def fetch(self) -> StepResult:
        """Waits until the device has done the step, and returns its result. Call once.

        Raises `StepMemoryError`; then the step has no result, nor has one after it.
        """
        self.choose()
        return self._result(self._launch.wait())


class ModelRunner:
    """Model runner of one device. Reads the `BatchSlots` arrays that the scheduler writes.

    Attributes:
        model, attention, sampler: what computes a step.
        graphs: recorded decode steps; None: every step is launched kernel by kernel.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: Attention,
        cache: KvCache,
        batch_slots: BatchSlots[Sequence],
        sampler: Sampler,
        vocab_size: int,
        device: torch.device,
        encoder: Encoder | None = None,
        graphs: DecodeGraphs | None = None,
        clock: StepClock | None = None,
        stream: DeviceStream | None = None,
        pooler: Pooler | None = None,
        rope: RopePositions | None = None,
    ) -> None:
        """Takes a `model` that already uses `attention`; reports times to `clock`; computes on
        `stream`, by default the device's. With a `pooler` the model has hidden states in place of
        logits. `rope`: of a model with M-RoPE that takes images."""
        self.model = model
        self._pooler = pooler
        self.attention = attention
        self._cache = cache
        self._batch_slots = batch_slots
        self.sampler = sampler
        self._stream = stream or stream_of(device)
        self._upload = uploader(device)
        self._encoder = encoder
        self._rope = rope
        self.graphs = graphs
        self._clock = clock or StepClock()
        self._grammars = GrammarMasks(len(batch_slots.owners), vocab_size)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a plan and returns its result."""
        return self.launch(plan).fetch()

    def launch(self, plan: StepPlan, previous: Launched | None = None) -> Launched:
        """Launches a plan on the device, without waiting for it.

        Args:
            previous: the step before, if its tokens are not in the `BatchSlots` arrays yet.
        """
        inputs, failure = None, None
        try:
            for sequence in plan.new_slots:
                spec = sequence.request.spec
                self.sampler.assign(sequence.batch_slot, spec.params, spec.num_prompt_tokens)
                self._grammars.assign(sequence.batch_slot, sequence.request)
                if self._rope is not None:
                    self._rope.assign(sequence.batch_slot, spec.encoder_inputs)
            if plan.num_tokens and not self._may_replay(plan):
                with self._clock.forward():
                    inputs = self.inputs(plan)
        except RuntimeError as error:
            failure = _memory_failure(error)
        chooses_later = self._reads_tokens(plan.sample_slots)
        compute = partial(self._compute, plan, inputs, previous, failure, chooses_later)
        choice = partial(self._launch_choice, plan) if chooses_later else None
        return Launched(self._stream.launch(compute), partial(self._result, plan), choice)

    def _reads_tokens(self, batch_slots: Int64Array) -> bool:
        """Returns whether the choice for any of these slots reads all earlier tokens on the host:
        because of a grammar, or of a penalty that the device has no history for."""
        return self._grammars.applies(batch_slots) or self.sampler.needs_history(batch_slots)

    def _launch_choice(self, plan: StepPlan, forward: Launch[_Computed]) -> Launch[_Computed]:
        slots, lengths = plan.sample_slots, plan.sample_lengths
        allowed = self._grammars.fill(slots, lengths, self._batch_slots.token_ids)
        return self._stream.launch(partial(self._choose_later, plan, forward, allowed))

    @torch.inference_mode()
    def _choose_later(
        self, plan: StepPlan, forward: Launch[_Computed], allowed: Allowed | None
    ) -> _Computed:
        """Chooses the tokens of a step whose forward was launched alone."""
        computed = forward.value
        if computed.logits is None:
            return computed
        try:
            with self._clock.sample():
                return self._choose(plan, computed.logits, allowed)
        except RuntimeError as error:
            return _Computed(failure=_memory_failure(error))

    @torch.inference_mode()
    def _compute(
        self,
        plan: StepPlan,
        inputs: ModelInputs | None,
        previous: Launched | None,
        failure: str | None,
        chooses_later: bool,
    ) -> _Computed:
        """Runs a plan on the device: its work in the order of the stream; of a plan whose inputs
        have a `failure`, what later steps rely on."""
        with self._clock.forward():
            if plan.has_memory_operations:
                self._move_blocks(plan)
            self._encode(plan)
            if failure is not None or not plan.num_tokens:
                return _Computed(failure=failure)
        try:
            return self._generate(plan, inputs, previous, chooses_later)
        except RuntimeError as error:
            return _Computed(failure=_memory_failure(error))

    def _generate(
        self,
        plan: StepPlan,
        inputs: ModelInputs | None,
        previous: Launched | None,
        chooses_later: bool,
    ) -> _Computed:
        if previous is not None and previous.failure is not None:
            return _Computed(failure=previous.failure)
        with self._clock.forward():
            logits = self._replay(plan, previous) if inputs is None else None
            if logits is None:
                inputs = inputs or self.inputs(plan)
                logits = self._forward(plan, inputs, previous)
        if chooses_later:
            return _Computed(logits=logits)
        with self._clock.sample():
            return self._choose(plan, logits)

    def _may_replay(self, plan: StepPlan) -> bool:
        if self.graphs is None or not plan.samples_every_token:
            return False
        return plan.num_tokens <= self.graphs.sizes[-1]

    def _replay(self, plan: StepPlan, previous: Launched | None) -> torch.Tensor | None:
        """Returns the logits of decodes and drafts from a CUDA graph; None if none fits."""
        assert self.graphs is not None, "a replay without graphs"
        ragged, num_unknown = self._ragged(plan), len(plan.previous_rows)
        batch_slots, positions = ragged.places()
        parts = [self._chosen(plan, previous)] if num_unknown else []
        if num_unknown < len(batch_slots):
            parts.append(self._given(batch_slots[num_unknown:], positions[num_unknown:]))
        offsets = None if self._rope is None else self._rope.offsets(batch_slots)
        return self.graphs.run(parts, ragged, None if offsets is None else self._upload(offsets))

    def _ragged(self, plan: StepPlan) -> RaggedBatch:
        """Returns the plan's tokens: those of its decodes, then those of its chunks."""
        columns = self._batch_slots
        decodes = RaggedBatch.of_decodes(
            plan.decode_slots,
            plan.decode_starts,
            columns.block_tables,
            columns.table_versions,
            columns.table_rewrites,
        )
        if not plan.chunks:
            return decodes
        batch_slots, starts, num_queries = np.array(
            [(s.sequence.batch_slot, s.start, s.end - s.start) for s in plan.chunks], np.int64
        ).T
        return replace(
            decodes,
            batch_slots=np.concatenate([decodes.batch_slots, batch_slots]),
            starts=np.concatenate([decodes.starts, starts]),
            num_queries=np.concatenate([decodes.num_queries, num_queries]),
            last_keys=None if self._encoder is None else self._encoder.last_keys(plan),
        )

    def _forward(
        self, plan: StepPlan, inputs: ModelInputs, previous: Launched | None
    ) -> torch.Tensor:
        token_ids = self._tokens_of(plan, previous, inputs.token_ids)
        features = None if self._encoder is None else self._encoder.features(plan)
        return self.model.forward(
            token_ids, inputs.positions, inputs.batch, inputs.logit_rows, features
        )

    def inputs(self, plan: StepPlan) -> ModelInputs:
        """Returns the model's inputs: the step's tokens that are known, the attention batch, and
        the slots of new K and V. The plan computes at least one token."""
        ragged = self._ragged(plan)
        batch = self.attention.prepare(ragged)
        positions = batch.positions
        if self._rope is not None:
            positions = self._rope.positions(ragged, batch.token_slots, positions)
        rows = plan.sample_rows
        if plan.chunks:
            rows = np.concatenate([rows, plan.beam_rows, _scored_rows(plan)])
        num_unknown = len(plan.previous_rows)
        return ModelInputs(
            self._given(batch.token_slots[num_unknown:], batch.positions[num_unknown:]),
            self._upload(positions),
            batch,
            self._upload(rows),
        )

    def _given(self, batch_slots: Int64Array, positions: Int64Array) -> torch.Tensor:
        """Returns the token ids that the batch slots have at these positions."""
        return self._upload(self._batch_slots.token_ids[batch_slots, positions].astype(np.int64))

    def _tokens_of(
        self, plan: StepPlan, previous: Launched | None, given: torch.Tensor
    ) -> torch.Tensor:
        """Returns a step's tokens: those that the step before has chosen, and those `given`."""
        if not len(plan.previous_rows):
            return given
        chosen = self._chosen(plan, previous)
        return torch.cat([chosen, given]) if len(given) else chosen

    def _chosen(self, plan: StepPlan, previous: Launched | None) -> torch.Tensor:
        """Returns the tokens that the step before has chosen for this one's first decodes."""
        assert previous is not None, "tokens of a step before, without one"
        rows, chosen = plan.previous_rows, previous.token_ids  # rows ascend
        return chosen[self._upload(rows)] if len(rows) < len(chosen) else chosen

    def _move_blocks(self, plan: StepPlan) -> None:
        """Swaps out, copies, clears, swaps in: nothing is overwritten before it was read."""
        pools, hosts = self._cache.pools, self._cache.host_pools
        _copy(plan.swap_out, pools, hosts)
        _copy(plan.copies, pools, pools)
        for group, pool in enumerate(pools):
            cleared = [block_id for g, block_id in plan.cleared if g == group]
            if cleared and self.attention.reads_unwritten:
                _with_memory(partial(pool.clear_blocks, cleared))
        _copy(plan.swap_in, hosts, pools)

    def _encode(self, plan: StepPlan) -> None:
        if self._encoder is None:
            assert not plan.encoder.to_compute, "encoder inputs without an encoder"
            return
        if plan.encoder.to_compute:
            _with_memory(partial(self._encoder.encode, plan.encoder.to_compute))

    def _choose(
        self, plan: StepPlan, logits: torch.Tensor, allowed: Allowed | None = None
    ) -> _Computed:
        """Computes what the plan asks of its logits: tokens, beam candidates and prompt scores."""
        if self._pooler is not None:
            return self._pool(self._pooler, plan, logits)
        num_sampled, num_beams = len(plan.sample_rows), len(plan.beam_rows)
        first_scored, to_host = num_sampled + num_beams, self._stream.to_host
        computed = _Computed()
        if num_sampled:
            choice = self.sampler.choose(
                logits[:num_sampled],
                plan.sample_slots,
                plan.sample_indices,
                plan.sample_lengths,
                self._batch_slots.token_ids,
                allowed,
            )
            computed = _Computed(
                token_ids=choice.token_ids,
                choice=choice.copied(to_host),
                has_grammar=allowed is not None,
            )
        if num_beams:
            beams = self._beam_candidates(plan, logits[num_sampled:first_scored])
            computed = replace(computed, beams=tuple(map(to_host, beams)))
        if len(logits) > first_scored:
            scores = self._score(plan, logits[first_scored:])
            computed = replace(computed, scores=tuple(scores))
        return computed

    def _pool(self, pooler: Pooler, plan: StepPlan, hidden: torch.Tensor) -> _Computed:
        """Computes what each range of the plan adds to the pooled output of its prompt. A prompt
        ends with a token that means nothing."""
        num_sampled, to_host = len(plan.sample_rows), self._stream.to_host
        tokens = torch.zeros(num_sampled, dtype=torch.int64, device=hidden.device)
        parts = pooler.parts(plan.chunks, hidden, num_sampled)
        pooled = (tuple(parts), to_host(torch.stack(list(parts.values())))) if parts else None
        choice = Choice(tokens).copied(to_host)
        return _Computed(token_ids=tokens, choice=choice, pooled=pooled)

    def _beam_candidates(self, plan: StepPlan, logits: torch.Tensor) -> Iterator[torch.Tensor]:
        token_ids, scores = self.sampler.beam_candidates(
            logits,
            plan.beam_slots,
            plan.beam_lengths,
            self._batch_slots.token_ids,
            plan.num_beam_candidates,
        )
        yield token_ids
        yield scores
        requests = (chunk.sequence.request for chunk in plan.chunks)
        if any(request.beams and request.spec.params.logprobs for request in requests):
            yield logits.log_softmax(-1, dtype=torch.float32).gather(-1, token_ids)

    def _score(self, plan: StepPlan, logits: torch.Tensor) -> Iterator[tuple[int, DeviceScores]]:
        """Yields the scores of prompt tokens, with the index of their chunk."""
        row = 0
        for i, chunk in enumerate(plan.chunks):
            if chunk.scored:
                targets = chunk.sequence.tokens[chunk.scored.start : chunk.scored.stop]
                k = chunk.sequence.request.spec.params.prompt_logprobs or 0
                found = score(logits[row : row + len(targets)], targets.astype(np.int64), k)
                yield i, found.copied(self._stream.to_host)
                row += len(targets)

    def _result(self, plan: StepPlan, computed: _Computed) -> StepResult:
        """Returns the result of a step that the device has done."""
        if computed.failure is not None:
            raise StepMemoryError(computed.failure)
        result = StepResult(np.zeros(0, np.int64))
        if computed.choice is not None:
            chosen = computed.choice.fetch()
            endings: dict[int, str | None] = {}
            if computed.has_grammar:
                columns = self._batch_slots.token_ids
                endings = self._grammars.accept(
                    plan.sample_slots, plan.sample_lengths, columns, chosen.token_ids
                )
            result = StepResult(
                chosen.token_ids,
                chosen.logprobs,
                chosen.top_ids,
                chosen.top_logprobs,
                endings=endings,
            )
        if computed.pooled is not None:
            indices, values = computed.pooled
            result = replace(result, pooled=dict(zip(indices, values.numpy(), strict=True)))
        if computed.beams:
            token_ids, scores, *logprobs = (beams.numpy() for beams in computed.beams)
            result = replace(
                result,
                beam_token_ids=token_ids,
                beam_scores=scores,
                beam_logprobs=logprobs[0] if logprobs else None,
            )
        if computed.scores:
            scored = {i: _token_logprobs(scores.fetch()) for i, scores in computed.scores}
            result = replace(result, prompt_logprobs=scored)
        return result


def _token_logprobs(scores: Scores) -> tuple[TokenLogprobs, ...]:
    columns = (scores.logprobs, scores.top_ids, scores.top_logprobs)
    return tuple(
        TokenLogprobs(logprob, tuple(ids), tuple(logprobs))
        for logprob, ids, logprobs in zip(*(c.tolist() for c in columns), strict=True)
    )


def _scored_rows(plan: StepPlan) -> Int64Array:
    """Returns the rows of the flat batch whose logits give prompt log-probabilities."""
    rows: list[int] = []
    begin = len(plan.decode_slots)
    for chunk in plan.chunks:
        if chunk.scored:
            first = begin - chunk.start - 1  # of the token before position 0
            rows += range(first + chunk.scored.start, first + chunk.scored.stop)
        begin += chunk.end - chunk.start
    return np.array(rows, np.int64)


def _copy(moves: SequenceOf[BlockMove], origins: list[KvPool], targets: list[KvPool]) -> None:
    for group, target in enumerate(targets):
        mine = [m for m in moves if m.group == group]
        if mine:
            pairs = [m.source for m in mine], [m.target for m in mine]
            _with_memory(partial(target.copy_blocks, *pairs, origins[group]))


def _with_memory(work: Callable[[], None]) -> None:
    """Does work on which the state of other requests depends. If memory is short, again after torch
    has freed what it caches; a second lack of memory ends the engine."""
    try:
        work()
    except RuntimeError as error:
        _memory_failure(error)
        torch.cuda.empty_cache()
        work()


def _memory_failure(error: RuntimeError) -> str:
    """Returns the text of a lack of device memory. Raises any other error."""
    if not is_out_of_memory(error):
        raise error
    return str(error)
