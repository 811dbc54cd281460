"""Model runner: moves blocks, builds the flat batch, runs model and head. Decides nothing."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from baton.engine.executor.attention.interface import Attention, RaggedBatch, StepBatch
from baton.engine.executor.cache.kv_pool import KvCache, KvPool
from baton.engine.executor.device import is_out_of_memory
from baton.engine.executor.device_stream import DeviceStream, Launch, uploader
from baton.engine.executor.grammar.masks import Allowed
from baton.engine.executor.models.cuda_graphs import NO_GRAPHS, Graphs
from baton.engine.executor.models.encoder_features import EncoderFeatures
from baton.engine.metering.step_times import StepClock
from baton.engine.scheduler.kv.encoder_cache import EncoderOutput
from baton.engine.scheduler.kv.memory_operations import BlockMove
from baton.engine.scheduler.plan import (
    StepPlan,
    StepResult,
)
from baton.engine.scheduler.sequences.batch_slots import BatchSlots, Int64Array
from baton.engine.scheduler.sequences.sequence import Sequence
from baton.models.images.encoder_input import EncoderInput


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


class _NoEncoder:
    """`Encoder` of a model that takes text alone."""

    def encode(self, _outputs: SequenceOf[EncoderOutput]) -> None:
        raise AssertionError("encoder inputs without an encoder")

    def features(self, _plan: StepPlan) -> None:
        return None

    def last_keys(self, _plan: StepPlan) -> None:
        return None


class Positions(Protocol):
    """Rotary positions of the tokens of running sequences."""

    def assign(self, batch_slot: int, inputs: SequenceOf[EncoderInput]) -> None:
        """Sets the images of the sequence that has acquired a slot."""
        ...

    def positions(
        self, ragged: RaggedBatch, batch_slots: Int64Array, indices: Int64Array
    ) -> Int64Array:
        """Returns the positions of a batch: `[num_tokens]` if all three dimensions are the same,
        else `[3, num_tokens]`.

        Args:
            batch_slots, indices: `[num_tokens]`, each token's slot and index in its sequence.
        """
        ...

    def offsets(self, batch_slots: Int64Array) -> Int64Array | None:
        """Returns what to add to the indices of tokens after their sequences' last images,
        `[num_tokens]`; None: nothing."""
        ...


class _Indices:
    """`Positions` of a model without M-RoPE: the indices of tokens in their sequences."""

    def assign(self, _batch_slot: int, _inputs: SequenceOf[EncoderInput]) -> None:
        pass

    def positions(
        self, _ragged: RaggedBatch, _batch_slots: Int64Array, indices: Int64Array
    ) -> Int64Array:
        return indices

    def offsets(self, _batch_slots: Int64Array) -> None:
        return None


NO_ENCODER: Encoder = _NoEncoder()
INDICES: Positions = _Indices()


class HeadOutput(Protocol):
    """Output of a head: `token_ids` is `[num_rows]` on the device, for the step after; None if the
    step chooses none."""

    @property
    def token_ids(self) -> torch.Tensor | None: ...


class Head(Protocol):
    """Head of steps: what an engine makes of its model's last layer."""

    def assign(self, sequence: Sequence) -> None:
        """Notes the request of a sequence that has acquired its slot."""
        ...

    def reads_tokens(self, batch_slots: Int64Array) -> bool:
        """Returns whether `compute` for any of these slots reads all earlier tokens on the host."""
        ...

    def allowed(self, plan: StepPlan) -> Allowed | None:
        """Returns what `compute` needs of the earlier tokens, once they are applied."""
        ...

    def compute(
        self, plan: StepPlan, logits: torch.Tensor, allowed: Allowed | None = None
    ) -> HeadOutput:
        """Launches what the plan asks of its logits or hidden states, `[num_rows, width]`."""
        ...

    def result(self, plan: StepPlan, output: Any) -> StepResult:
        """Returns the result of a step that the device has done, from what `compute` returned."""
        ...


@dataclass(frozen=True, slots=True)
class _Computed:
    """Results of a step.

    Attributes:
        logits: `[num_logits, vocab_size]` on the device, if later work chooses tokens of them.
        output: what the head has made of them.
        failure: why there are no results: the device had too little memory.
    """

    logits: torch.Tensor | None = None
    output: HeadOutput | None = None
    failure: str | None = None


class StepMemoryError(Exception):
    """Lack of device memory for a step's inputs, forward or sampling. Its block moves are done."""


class Launched:
    """Step that is launched on the device, without waiting for its tokens.

    If its choice of tokens reads earlier ones on the host, only the forward is, until `choose`.

    Attributes:
        has_late: some of its rows choose no token, as in `StepResult`; known after `choose`.
    """

    def __init__(
        self,
        launch: Launch[_Computed],
        result: Callable[[_Computed], StepResult],
        choice: Callable[[Launch[_Computed]], tuple[Launch[_Computed], bool]] | None,
    ) -> None:
        """`choice` launches the choice after the forward, and returns `has_late`."""
        self.has_late = False
        self._launch = launch
        self._result = result
        self._choice = choice

    def choose(self) -> None:
        """Launches the choice of tokens, once those of the step before are applied. Idempotent."""
        if self._choice is not None:
            self._launch, self.has_late = self._choice(self._launch)
            self._choice = None

    @property
    def failure(self) -> str | None:
        """Reason why the step has no result, for work that is launched after it."""
        return self._launch.value.failure

    @property
    def token_ids(self) -> torch.Tensor:
        """The tokens on the device, `[num_rows]`, for work that is launched after `choose`."""
        output = self._launch.value.output
        assert output is not None, "a step after one without output"
        assert output.token_ids is not None, "a step after one without tokens"
        return output.token_ids

    def fetch(self) -> StepResult:
        """Waits until the device has done the step, and returns its result. Call once.

        Raises `StepMemoryError`; then the step has no result, nor has one after it.
        """
        self.choose()
        return self._result(self._launch.wait())


class ModelRunner:
    """Model runner of one device. Reads the `BatchSlots` arrays that the scheduler writes.

    Attributes:
        model, attention, head: what computes a step.
        graphs: recorded decode steps; others are launched kernel by kernel.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: Attention,
        cache: KvCache,
        batch_slots: BatchSlots[Sequence],
        head: Head,
        stream: DeviceStream,
        clock: StepClock,
        *,
        encoder: Encoder = NO_ENCODER,
        positions: Positions = INDICES,
        graphs: Graphs = NO_GRAPHS,
    ) -> None:
        """Takes a `model` that already uses `attention`; reports times to `clock`; computes on
        `stream`, which is the device's."""
        self.model = model
        self.attention = attention
        self.head = head
        self.graphs = graphs
        self._encoder = encoder
        self._positions = positions
        self._cache = cache
        self._batch_slots = batch_slots
        self._stream = stream
        self._clock = clock
        self._upload = uploader(cache.pools[0].device)

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
                self.head.assign(sequence)
                self._positions.assign(sequence.batch_slot, sequence.request.spec.encoder_inputs)
            if plan.num_tokens and not self._may_replay(plan):
                with self._clock.forward():
                    inputs = self.inputs(plan)
        except RuntimeError as error:
            failure = _memory_failure(error)
        chooses_later = self.head.reads_tokens(plan.sample_slots)
        compute = partial(self._compute, plan, inputs, previous, failure, chooses_later)
        choice = partial(self._launch_choice, plan) if chooses_later else None
        return Launched(self._stream.launch(compute), partial(self._result, plan), choice)

    def _launch_choice(
        self, plan: StepPlan, forward: Launch[_Computed]
    ) -> tuple[Launch[_Computed], bool]:
        allowed = self.head.allowed(plan)
        launch = self._stream.launch(partial(self._choose_later, plan, forward, allowed))
        return launch, allowed is not None and bool(allowed.late)

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
                return _Computed(output=self.head.compute(plan, computed.logits, allowed))
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
            if plan.encoder.to_compute:
                _with_memory(partial(self._encoder.encode, plan.encoder.to_compute))
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
            return _Computed(output=self.head.compute(plan, logits))

    def _may_replay(self, plan: StepPlan) -> bool:
        return plan.samples_every_token and plan.num_tokens <= self.graphs.max_tokens

    def _replay(self, plan: StepPlan, previous: Launched | None) -> torch.Tensor | None:
        """Returns the logits of decodes and drafts from a CUDA graph; None if none fits."""
        ragged, num_unknown = self._ragged(plan), len(plan.previous_rows)
        batch_slots, positions = ragged.places()
        parts = [self._chosen(plan, previous)] if num_unknown else []
        if num_unknown < len(batch_slots):
            parts.append(self._given(batch_slots[num_unknown:], positions[num_unknown:]))
        offsets = self._positions.offsets(batch_slots)
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
            last_keys=self._encoder.last_keys(plan),
        )

    def _forward(
        self, plan: StepPlan, inputs: ModelInputs, previous: Launched | None
    ) -> torch.Tensor:
        token_ids = self._tokens_of(plan, previous, inputs.token_ids)
        features = self._encoder.features(plan)
        return self.model.forward(
            token_ids, inputs.positions, inputs.batch, inputs.logit_rows, features
        )

    def inputs(self, plan: StepPlan) -> ModelInputs:
        """Returns the model's inputs: the step's tokens that are known, the attention batch, and
        the slots of new K and V. The plan computes at least one token."""
        ragged = self._ragged(plan)
        batch = self.attention.prepare(ragged)
        positions = self._positions.positions(ragged, batch.token_slots, batch.positions)
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

    def _result(self, plan: StepPlan, computed: _Computed) -> StepResult:
        if computed.failure is not None:
            raise StepMemoryError(computed.failure)
        if computed.output is None:
            return StepResult(np.zeros(0, np.int64))
        return self.head.result(plan, computed.output)


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
