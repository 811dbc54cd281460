"""Latency model of workers, fitted to what they report.

The workers of a pool run the same model with the same layout, so seconds per step, token, pair and
token of an encoder input are fitted to the reports of all of them, and apply at once to a worker
that joins. Each worker has one parameter of its own: the factor by which it is slower than its
pool. Differences that are small or within the spread of the worker's reports count as noise, so
that equal workers stay equal, prefixes stay where they are cached and load stays even. A slowdown
of all machines is not attributed to the worker that reports it first. Independent of protobuf
messages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.rpc.worker_role import Role
from baton_router.routing.fleet.cost_rates import PRIOR, STEPS_SLOWED, Rates
from baton_router.routing.fleet.regression import Coefficient, Regression

# Lower bound against noisy reports: a token always costs something, so that of two workers that
# differ only in cached tokens, the one with more is cheaper.
_LEAST_PER_TOKEN = 1e-7

_WORK = (
    Coefficient(PRIOR.prefill_seconds_per_step, 1e-3, 1.0),
    Coefficient(PRIOR.prefill_seconds_per_token, 1e-4, 1e-1, _LEAST_PER_TOKEN),
    Coefficient(PRIOR.attention_seconds_per_pair, 1e-8, 1e-5),
    Coefficient(PRIOR.interference_seconds_per_sequence / STEPS_SLOWED, 2e-5, 1e-1),
    Coefficient(PRIOR.encoder_seconds_per_token, 1e-4, 1e-1, _LEAST_PER_TOKEN),
)
_TRANSFER = (
    Coefficient(PRIOR.handoff_seconds, 2e-3, 1.0),
    Coefficient(PRIOR.transfer_seconds_per_token, 5e-6, 1e-2, _LEAST_PER_TOKEN),
)
_PRIOR_TRANSFER = (PRIOR.handoff_seconds, PRIOR.transfer_seconds_per_token)
_MIN_CHANGE = 0.05  # relative change of a coefficient below which its published value stays
_SHORTEST = 1e-6  # seconds; lower bound of measured and expected times

_ENOUGH_TOKENS = 512  # prompt or encoder tokens after which a pool uses its own fit for them
_MIN_DEVIATION = math.log(1.25)  # log of the smallest slowness that is not noise
_LARGEST = math.log(100.0)
_MAX_RESIDUAL = 1.0  # log bound on the influence of one report
_WEIGHT = 0.1  # of one report, in a worker's slowness
_MAX_LEVEL_STEP = 0.1  # largest change of the pool's log level per report


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work done by a worker since its start: `baton.v1.WorkDone`, in seconds."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    num_decode_tokens: int = 0
    seconds: float = 0.0
    num_encoder_tokens: int = 0

    def since(self, before: "WorkDone") -> "WorkDone":
        return WorkDone(
            self.num_steps - before.num_steps,
            self.num_prompt_tokens - before.num_prompt_tokens,
            self.num_prompt_pairs - before.num_prompt_pairs,
            self.num_decode_tokens - before.num_decode_tokens,
            self.seconds - before.seconds,
            self.num_encoder_tokens - before.num_encoder_tokens,
        )

    @property
    def features(self) -> tuple[float, ...]:
        """The features of the coefficients in `_WORK`, in order."""
        return (
            self.num_steps,
            self.num_prompt_tokens,
            self.num_prompt_pairs,
            self.num_decode_tokens,
            self.num_encoder_tokens,
        )


class PoolModel:
    """Latency model of a pool: the interchangeable workers of one role.

    Args:
        base: prefill pool of the same model: the one paired with this decode or encode pool, or
            that of an earlier version. Its coefficients of prompts and of encoder inputs apply
            until this pool has computed `_ENOUGH_TOKENS` of them; with a slow prior, a pool might
            never be tried.
    """

    def __init__(self, base: "PoolModel | None" = None) -> None:
        self._base = base
        self._num_prompt_tokens = 0
        self._num_encoder_tokens = 0
        self._log_level = 0.0  # log of the median of recent reports' actual / expected seconds
        self._connector = ""
        self._work = _SteadyRegression(_WORK)
        self._transfers: dict[str, _SteadyRegression] = {}
        # Cache, cleared when a coefficient moves.
        self._rates: dict[tuple[tuple[float, ...], int, float, str], Rates] = {}

    def observe_work(self, work: WorkDone) -> float:
        """Adds a worker's report. Returns the log of its seconds over those expected from recent
        reports of the pool; positive means slower."""
        expected = max(self._work.expected(work.features), _SHORTEST)
        residual = math.log(work.seconds / expected) - self._log_level
        self._log_level += min(max(residual, -_MAX_LEVEL_STEP), _MAX_LEVEL_STEP)
        self._num_prompt_tokens += work.num_prompt_tokens
        self._num_encoder_tokens += work.num_encoder_tokens
        if self._work.observe(work.features, work.seconds):
            self._rates.clear()
        return residual

    def received(self, num_tokens: float, exposed_seconds: float, connector: str) -> None:
        """Adds a transfer of `num_tokens` tokens of KV by `connector`, whose exposed latency was
        `exposed_seconds`."""
        self._connector = connector
        transfers = self._transfers.setdefault(connector, _SteadyRegression(_TRANSFER))
        if transfers.observe((1.0, num_tokens), max(exposed_seconds, _SHORTEST)):
            self._rates.clear()

    def rates(self, max_step_tokens: int, slowness: float, connector: str) -> Rates:
        """Returns the rates of a worker with these steps and slowness that receives blocks by
        `connector`; if empty, by the connector used last in the pool."""
        key = (self._values, max_step_tokens, slowness, connector or self._connector)
        if key not in self._rates:
            self._rates[key] = self._made(*key)
        return self._rates[key]

    @property
    def _values(self) -> tuple[float, ...]:
        """The coefficients in `_WORK` that apply."""
        own, base = self._work.values, self._base
        if base is None:
            return own
        knows_prompts = self._num_prompt_tokens >= _ENOUGH_TOKENS
        knows_inputs = self._num_encoder_tokens >= _ENOUGH_TOKENS
        if knows_prompts and knows_inputs:
            return own
        others = base._values
        prompt, inputs = own if knows_prompts else others, own if knows_inputs else others
        return (*prompt[:3], own[3], inputs[4])

    def _made(
        self, values: tuple[float, ...], max_step_tokens: int, slowness: float, connector: str
    ) -> Rates:
        step, token, pair, decode_token, encoder_token = (slowness * value for value in values)
        transfers = self._transfers.get(connector)
        handoff, moved = _PRIOR_TRANSFER if transfers is None else transfers.values
        return Rates(
            prefill_seconds_per_step=step,
            prefill_seconds_per_token=token,
            attention_seconds_per_pair=pair,
            max_step_tokens=max_step_tokens,
            handoff_seconds=handoff,
            transfer_seconds_per_token=moved,
            interference_seconds_per_sequence=decode_token * STEPS_SLOWED,
            slowness=slowness,
            encoder_seconds_per_token=encoder_token,
        )


class PoolModels:
    """Latency models of pools, by role and pairing."""

    def __init__(self) -> None:
        self._pools: dict[tuple[Role, bytes], PoolModel] = {}

    def of(self, role: Role, pairing: bytes) -> PoolModel:
        """Returns the latency model of a pool. A pool with a new pairing, such as that of a new
        version, starts with the coefficients of the latest prefill pool."""
        if ("prefill", pairing) not in self._pools:
            former = [pool for (known, _), pool in self._pools.items() if known == "prefill"]
            prefill = PoolModel(former[-1] if former else None)
            self._pools["prefill", pairing] = prefill
            self._pools["decode", pairing] = PoolModel(prefill)
            self._pools["encode", pairing] = PoolModel(prefill)
        return self._pools[role, pairing]


class _SteadyRegression:
    """Regression with hysteresis: publishes new values only when they have moved, so that snapshots
    need not be made or recorded again after small changes.

    Attributes:
        values: the coefficients published last.
    """

    def __init__(self, coefficients: tuple[Coefficient, ...]) -> None:
        self._regression = Regression(coefficients)
        self._scales = [c.scale for c in coefficients]
        self.values = self._regression.values

    def expected(self, features: Sequence[float]) -> float:
        return self._regression.expected(features)

    def observe(self, features: Sequence[float], y: float) -> bool:
        """Adds an observation. Returns whether the published values have changed."""
        self._regression.observe(features, y)
        values = self._regression.values
        if all(map(_is_near, values, self.values, self._scales)):
            return False
        self.values = values
        return True


def _is_near(value: float, published: float, scale: float) -> bool:
    return abs(value - published) <= _MIN_CHANGE * max(published, _MIN_CHANGE * scale)


class WorkerModel:
    """Latency model of one worker, in one epoch.

    Args:
        max_step_tokens: maximum tokens of its steps; 0: unknown.

    Attributes:
        connector: connector of the last transfer; empty: none yet. Few workers ever use two.
        done: meters of the worker as of its last report.
        slowness: factor by which it is slower than its pool; 1 if the difference may be noise.
        step_seconds: mean seconds of its recent steps; 0 before the first report.
    """

    def __init__(self, pool: PoolModel, max_step_tokens: int = 0) -> None:
        self.connector = ""
        self.slowness = 1.0
        self.step_seconds = 0.0
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self.done = WorkDone()
        self._log_slowness = 0.0
        self._spread = _MIN_DEVIATION  # mean absolute deviation of its reports from that

    @property
    def rates(self) -> Rates:
        return self._pool.rates(self._max_step_tokens, self.slowness, self.connector)

    def observe_work(self, done: WorkDone) -> None:
        """Adds a report of all work since the worker's start. Ignores one that arrives after a
        later report."""
        work = done.since(self.done)
        if work.num_steps <= 0 or work.seconds <= 0 or min(work.features) < 0:
            return
        self.done = done
        step_seconds = work.seconds / work.num_steps
        weight = _WEIGHT if self.step_seconds else 1.0
        self.step_seconds += weight * (step_seconds - self.step_seconds)
        residual = self._pool.observe_work(work) - self._log_slowness
        bounded = min(max(residual, -_MAX_RESIDUAL), _MAX_RESIDUAL)
        self._log_slowness += _WEIGHT * bounded
        self._spread += _WEIGHT * (abs(bounded) - self._spread)
        threshold, size = max(_MIN_DEVIATION, self._spread), abs(self._log_slowness)
        if size < threshold / 2:
            self.slowness = 1.0
        elif abs(self._log_slowness - math.log(self.slowness)) > threshold:
            slowness = math.exp(min(self._log_slowness, _LARGEST))
            self.slowness = slowness if size > threshold else 1.0

    def received(self, num_tokens: float, exposed_seconds: float, connector: str) -> None:
        """Adds a transfer of `num_tokens` tokens of KV to this worker, which waited for it
        `exposed_seconds` after the prompt was computed."""
        self.connector = connector
        self._pool.received(num_tokens, exposed_seconds, connector)
