"""Model runner: moves blocks, builds the flat batch, runs the model, samples. Decides nothing."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from baton.engine.attention.interface import Attention, RaggedBatch, StepBatch, uploader
from baton.engine.cache.kv_pool import KvCache, KvPool
from baton.engine.grammar.masks import GrammarMasks
from baton.engine.metering.step_times import StepClock
from baton.engine.models.cuda_graphs import DecodeGraphs
from baton.engine.sampling.sampler import Sampler, score
from baton.engine.scheduler.kv.memory_operations import BlockMove
from baton.engine.scheduler.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, Int64Array
from baton.engine.scheduler.sequences.encoder_inputs import EncoderInput
from baton.engine.scheduler.sequences.sequence import Sequence

_NOTHING = StepResult(np.zeros(0, np.int64))


class DecoderModel(Protocol):
    """Decoder model over a flat batch that writes K and V to the cache. `execution` names the
    implementation and its arrangement of K and V."""

    execution: str

    def use(self, paged: Attention) -> None: ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of the model for one step.

    Attributes:
        token_ids, positions: `[num_tokens]`.
        logit_rows: `[num_rows]`, tokens whose logits are needed.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    batch: StepBatch
    logit_rows: torch.Tensor


class Encoder(Protocol):
    """Encoder of multimodal inputs: computes their outputs and keeps them until `forget`."""

    def encode(self, request_id: str, encoder_input: EncoderInput) -> None: ...

    def forget(self, content_hash: bytes) -> None: ...


class Launched:
    """Step that is launched on the device, without waiting for its tokens.

    Attributes:
        batch_slots: the slot of each token, `[num_rows]`.
        token_ids: `[num_rows]` on the device; None if the step chooses none.
    """

    def __init__(
        self,
        batch_slots: Int64Array,
        token_ids: torch.Tensor | None,
        fetch: Callable[[], StepResult],
    ) -> None:
        self.batch_slots = batch_slots
        self.token_ids = token_ids
        self._fetch = fetch

    def fetch(self) -> StepResult:
        """Waits for the result. Call once."""
        return self._fetch()


class ModelRunner:
    """Model runner of one device. Reads the `BatchSlots` arrays that the scheduler writes."""

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
    ) -> None:
        """Takes a `model` that already uses `attention`; reports times to `clock`."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._batch_slots = batch_slots
        self._sampler = sampler
        self._device = device
        self._upload = uploader(device)
        self._encoder = encoder
        self._graphs = graphs
        self._clock = clock or StepClock()
        self._grammars = GrammarMasks(len(batch_slots.owners), vocab_size)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a plan and returns its result."""
        return self.launch(plan).fetch()

    def can_launch_ahead(self, plan: StepPlan) -> bool:
        """Returns True if the next step could be launched before this one's tokens are known."""
        batch_slots = plan.sample_slots
        return not (self._sampler.needs_history(batch_slots) or self._grammars.applies(batch_slots))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, previous: Launched | None = None) -> Launched:
        """Launches a plan on the device. Does not wait if the plan only samples tokens.

        Args:
            previous: the step before, if its tokens are not in the `BatchSlots` arrays yet.
        """
        with self._clock.forward():
            if plan.has_memory_operations:
                self._move_blocks(plan)
            for sequence in plan.new_slots:
                request = sequence.request
                self._sampler.assign(sequence.batch_slot, request.params, request.num_prompt_tokens)
                self._grammars.assign(sequence.batch_slot, request)
            self._encode(plan)
            if not plan.num_tokens:
                return Launched(plan.sample_slots, None, lambda: _NOTHING)
            logits = self._forward(plan, previous)
        with self._clock.sample():
            if len(logits) == len(plan.sample_rows):
                return self._sample(plan, logits)
            result = self._choose(plan, logits)
            return Launched(plan.sample_slots, None, lambda: result)

    def _forward(self, plan: StepPlan, previous: Launched | None) -> torch.Tensor:
        """Returns the logits that the plan asks for, from a CUDA graph if possible."""
        if self._graphs is not None and plan.is_pure_decode:
            ragged = RaggedBatch.of_decodes(
                plan.decode_slots, plan.decode_starts, self._batch_slots.block_tables
            )
            token_ids = self._token_ids(ragged, plan.decode_slots, plan.decode_starts, previous)
            replayed = self._graphs.run(token_ids, self._upload(plan.decode_starts), ragged)
            if replayed is not None:
                return replayed
        inputs = self.inputs(plan, previous)
        return self._model.forward(
            inputs.token_ids, inputs.positions, inputs.batch, inputs.logit_rows
        )

    def inputs(self, plan: StepPlan, previous: Launched | None = None) -> ModelInputs:
        """Returns the model's inputs: the step's tokens, the attention batch, and the slots of new
        K and V. The plan computes at least one token."""
        batch_slots, starts = plan.decode_slots, plan.decode_starts
        tables = self._batch_slots.block_tables
        if not plan.chunks:
            ragged = RaggedBatch.of_decodes(batch_slots, starts, tables)
        else:
            chunks = np.array(
                [(s.sequence.batch_slot, s.start, s.end - s.start) for s in plan.chunks], np.int64
            ).T
            ragged = RaggedBatch(
                np.concatenate([batch_slots, chunks[0]]),
                np.concatenate([starts, chunks[1]]),
                np.concatenate([np.ones_like(batch_slots), chunks[2]]),
                len(batch_slots),
                tables,
            )
        batch = self._attention.prepare(ragged)
        rows = plan.sample_rows
        if plan.chunks:
            rows = np.concatenate([rows, plan.beam_rows, _scored_rows(plan)])
        return ModelInputs(
            self._token_ids(ragged, batch.token_slots, batch.positions, previous),
            self._upload(batch.positions),
            batch,
            self._upload(rows),
        )

    def _token_ids(
        self,
        ragged: RaggedBatch,
        batch_slots: Int64Array,
        positions: Int64Array,
        previous: Launched | None,
    ) -> torch.Tensor:
        """Returns token ids from the batch slots, those of decodes from the step before."""
        num_chosen = 0 if previous is None else ragged.num_decodes
        given = self._batch_slots.token_ids[
            batch_slots[num_chosen:], positions[num_chosen:]
        ].astype(np.int64)
        if previous is None or not num_chosen:
            return self._upload(given)
        chosen = self._tokens_of(previous, batch_slots[:num_chosen])
        return torch.cat([chosen, self._upload(given)]) if given.size else chosen

    def _tokens_of(self, step: Launched, batch_slots: Int64Array) -> torch.Tensor:
        """Returns the tokens that a step has chosen for these slots, which are some of its own in
        its order. Does not wait."""
        assert step.token_ids is not None, "a step behind one without tokens"
        if len(batch_slots) == len(step.batch_slots):
            return step.token_ids
        return step.token_ids[self._upload(np.flatnonzero(np.isin(step.batch_slots, batch_slots)))]

    def _move_blocks(self, plan: StepPlan) -> None:
        """Swaps out, copies, clears, swaps in: nothing is overwritten before it was read."""
        pools, hosts = self._cache.pools, self._cache.host_pools
        _copy(plan.swap_out, pools, hosts)
        _copy(plan.copies, pools, pools)
        for group, pool in enumerate(pools):
            cleared = [block_id for g, block_id in plan.cleared if g == group]
            if cleared and self._attention.reads_unwritten:
                pool.clear_blocks(cleared)
        _copy(plan.swap_in, hosts, pools)

    def _encode(self, plan: StepPlan) -> None:
        if self._encoder is None:
            assert not plan.encoder.to_compute, "encoder inputs without an encoder"
            return
        for content_hash in plan.encoder.freed:
            self._encoder.forget(content_hash)
        for request_id, encoder_input in plan.encoder.to_compute:
            self._encoder.encode(request_id, encoder_input)

    def _choose(self, plan: StepPlan, logits: torch.Tensor) -> StepResult:
        """Returns the result of a plan with ranges: samples, beam candidates and prompt scores."""
        num_sampled, num_beams = len(plan.sample_rows), len(plan.beam_rows)
        result = _NOTHING
        if num_sampled:
            result = self._sample(plan, logits[:num_sampled]).fetch()
        if num_beams:
            result = self._beam_candidates(
                plan, logits[num_sampled : num_sampled + num_beams], result
            )
        if len(logits) > num_sampled + num_beams:
            scores = self._score(plan, logits[num_sampled + num_beams :])
            result = replace(result, prompt_logprobs=scores)
        return result

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> Launched:
        columns, batch_slots, lengths = (
            self._batch_slots.token_ids,
            plan.sample_slots,
            plan.sample_lengths,
        )
        allowed = self._grammars.fill(batch_slots, lengths, columns)
        choice = self._sampler.choose(
            logits, batch_slots, plan.sample_indices, lengths, columns, allowed
        )

        def fetch() -> StepResult:
            chosen = choice.fetch()
            endings: dict[int, str | None] = {}
            if allowed is not None:
                endings = self._grammars.accept(batch_slots, lengths, columns, chosen.token_ids)
            return StepResult(
                chosen.token_ids,
                chosen.logprobs,
                chosen.top_ids,
                chosen.top_logprobs,
                endings=endings,
            )

        return Launched(batch_slots, choice.token_ids, fetch)

    def _beam_candidates(
        self, plan: StepPlan, logits: torch.Tensor, result: StepResult
    ) -> StepResult:
        token_ids, scores = self._sampler.beam_candidates(
            logits,
            plan.beam_slots,
            plan.beam_lengths,
            self._batch_slots.token_ids,
            plan.num_beam_candidates,
        )
        logprobs = None
        if any(s.sequence.request.params.logprobs for s in plan.chunks if s.sequence.request.beams):
            chosen = torch.from_numpy(token_ids).to(logits.device)
            logprobs = logits.log_softmax(-1, dtype=torch.float32).gather(-1, chosen).cpu().numpy()
        return replace(result, beam_token_ids=token_ids, beam_scores=scores, beam_logprobs=logprobs)

    def _score(self, plan: StepPlan, logits: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Returns log-probabilities of prompt tokens, by the index of their range."""
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        row = 0
        for i, chunk in enumerate(plan.chunks):
            if chunk.scored:
                targets = chunk.sequence.tokens[chunk.scored.start : chunk.scored.stop]
                k = chunk.sequence.request.params.prompt_logprobs or 0
                found = score(logits[row : row + len(targets)], targets.astype(np.int64), k)
                scores[i] = tuple(
                    TokenLogprobs(logprob, tuple(ids), tuple(logprobs))
                    for logprob, ids, logprobs in zip(
                        found.logprobs.tolist(),
                        found.top_ids.tolist(),
                        found.top_logprobs.tolist(),
                        strict=True,
                    )
                )
                row += len(targets)
        return scores


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
            target.copy_blocks([m.source for m in mine], [m.target for m in mine], origins[group])
