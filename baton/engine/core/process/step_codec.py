"""Step outputs as bytes: one record per step.

    header | rows | rest

The header is the step's numbers and times. A row is six integers of one sequence's update, which
is all that a plain decode has. The rest is in MessagePack: the ids of the requests, and what few
updates and few steps have.
"""

import struct
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from baton.cluster.events.kv_events import KvEvents
from baton.engine.core.process.error_codec import ErrorData, data_of, error_of
from baton.engine.metering.step_times import StepTimes, TimeSpent
from baton.engine.outputs import SequenceUpdate, StepOutput
from baton.engine.request import FinishReason
from baton.engine.scheduler.kv.encoder_cache import HeldOutput
from baton.engine.scheduler.plan import ExternalAllocation, TokenLogprobs
from baton.engine.scheduler.sequences.config import Preemption

# Number of updates, made_progress; started and ended; both readings of the time spent.
_HEADER: Final = struct.Struct("<I?3x2d" + 2 * "q3d")
_ROW_WIDTH: Final = 6
_NONE: Final = -1
_REASONS: Final = {reason.value: reason for reason in FinishReason}


@dataclass(frozen=True, slots=True)
class _Details:
    """Fields that few updates have."""

    logprobs: TokenLogprobs | None
    block_ids: tuple[tuple[int, ...], ...]
    score: float | None
    failure: str | None
    prompt_logprobs: tuple[TokenLogprobs, ...]
    pooled: bytes | None


_PLAIN: Final = _Details(None, (), None, None, (), None)


class _Rest(msgspec.Struct, array_like=True):
    """All that has no fixed layout. `details` are by number of the update."""

    request_ids: list[str]
    details: dict[int, _Details]
    external: tuple[ExternalAllocation, ...]
    cache_events: KvEvents | None
    preempted: tuple[tuple[str, Preemption], ...]
    failed: dict[str, ErrorData]
    held_outputs: tuple[HeldOutput, ...]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Rest).decode


def encode_step(output: StepOutput) -> bytes:
    """Returns the output of a step as bytes."""
    updates, times = output.updates, output.times
    header = _HEADER.pack(
        len(updates),
        output.made_progress,
        times.started,
        times.ended,
        *_fields(times.before),
        *_fields(times.after),
    )
    rows = np.array(list(map(_row, updates)), np.int64)
    rest = _Rest(
        [update.request_id for update in updates],
        {i: _details(update) for i, update in enumerate(updates) if _has_details(update)},
        output.external,
        output.cache_events or None,
        output.preempted,
        {request_id: data_of(error) for request_id, error in output.failed.items()},
        output.held_outputs,
    )
    return b"".join((header, rows.tobytes(), _encode(rest)))


def decode_step(record: "bytes | memoryview[int]") -> StepOutput:
    """Returns the output that `encode_step` was given."""
    num_updates, made_progress, started, ended, *spent = _HEADER.unpack_from(record)
    rows = np.frombuffer(record, np.int64, num_updates * _ROW_WIDTH, _HEADER.size)
    rest = _decode(memoryview(record)[_HEADER.size + rows.nbytes :])
    return StepOutput(
        updates=tuple(
            _update(request_id, row, rest.details.get(i, _PLAIN))
            for i, (request_id, row) in enumerate(
                zip(rest.request_ids, rows.reshape(-1, _ROW_WIDTH).tolist(), strict=True)
            )
        ),
        external=rest.external,
        cache_events=rest.cache_events or KvEvents((), (), False),
        made_progress=made_progress,
        times=StepTimes(started, ended, TimeSpent(*spent[:4]), TimeSpent(*spent[4:])),
        preempted=rest.preempted,
        failed={request_id: error_of(data) for request_id, data in rest.failed.items()},
        held_outputs=rest.held_outputs,
    )


def _fields(spent: TimeSpent) -> tuple[int, float, float, float]:
    return spent.num_steps, spent.schedule, spent.forward, spent.sample


def _row(update: SequenceUpdate) -> tuple[int, ...]:
    reason = update.finish_reason
    return (
        update.index,
        _NONE if update.token_id is None else update.token_id,
        update.position,
        _NONE if reason is None else reason.value,
        update.num_computed_tokens,
        update.num_cached_tokens,
    )


def _has_details(update: SequenceUpdate) -> bool:
    return not (
        update.logprobs is None
        and not update.block_ids
        and update.score is None
        and update.failure is None
        and not update.prompt_logprobs
        and update.pooled is None
    )


def _details(update: SequenceUpdate) -> _Details:
    return _Details(
        update.logprobs,
        update.block_ids,
        update.score,
        update.failure,
        update.prompt_logprobs,
        None if update.pooled is None else update.pooled.astype(np.float32).tobytes(),
    )


def _update(request_id: str, row: list[int], details: _Details) -> SequenceUpdate:
    index, token_id, position, reason, num_computed, num_cached = row
    return SequenceUpdate(
        request_id,
        index,
        None if token_id == _NONE else token_id,
        position,
        details.logprobs,
        None if reason == _NONE else _REASONS[reason],
        num_computed,
        num_cached,
        details.block_ids,
        details.score,
        details.failure,
        details.prompt_logprobs,
        None if details.pooled is None else np.frombuffer(details.pooled, np.float32),
    )
