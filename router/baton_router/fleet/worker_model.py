"""Latency model of workers, fitted to what they report.

The workers of a pool run the same model with the same layout, so what a step, a token or a pair
takes is fitted to the reports of all of them, and a worker that joins is known at once. Of each
worker only one number is its own: how much slower than its pool it is. Small differences, and those
within which its reports differ from each other, are taken for noise, so that equal workers stay
equal, what is cached stays where it is, and what is even stays evenly loaded. Nor is it one
worker's slowness if the machines of all are busy for a while and it is the one that has reported.
Knows nothing of messages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton_router.fleet.cost_rates import PRIOR, STEPS_SLOWED, Rates
from baton_router.fleet.regression import Coefficient, Regression

# Whatever noisy reports say, no token is for nothing: of workers that are alike but for what they
# hold, the one that holds more is the cheaper one.
_LEAST_PER_TOKEN = 1e-7

_WORK = (
    Coefficient(PRIOR.prefill_seconds_per_step, 1e-3, 1.0),
    Coefficient(PRIOR.prefill_seconds_per_token, 1e-4, 1e-1, _LEAST_PER_TOKEN),
    Coefficient(PRIOR.attention_seconds_per_pair, 1e-8, 1e-5),
    Coefficient(PRIOR.interference_seconds_per_sequence / STEPS_SLOWED, 2e-5, 1e-1),
)
_TRANSFER = (
    Coefficient(PRIOR.handoff_seconds, 2e-3, 1.0),
    Coefficient(PRIOR.transfer_seconds_per_token, 5e-6, 1e-2, _LEAST_PER_TOKEN),
)
_PRIOR_TRANSFER = (PRIOR.handoff_seconds, PRIOR.transfer_seconds_per_token)
_MOVED = 0.05  # the part of a coefficient by which it may be off
_SHORTEST = 1e-6  # seconds; what is measured as less

_ENOUGH_TOKENS = 512  # of prompts, to know what they take
_NOTICED = math.log(1.25)  # differences in speed that are no noise
_LARGEST = math.log(100.0)
_LARGEST_SURPRISE = 1.0  # of one report
_WEIGHT = 0.1  # of one report, in a worker's slowness
_FOLLOWED = 0.1  # of what all workers have become slower by, with each report


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Work of a worker since its start: `baton.v1.WorkDone`, in seconds."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: int = 0
    num_decode_tokens: int = 0
    seconds: float = 0.0

    def since(self, before: "WorkDone") -> "WorkDone":
        return WorkDone(
            self.num_steps - before.num_steps,
            self.num_prompt_tokens - before.num_prompt_tokens,
            self.num_prompt_pairs - before.num_prompt_pairs,
            self.num_decode_tokens - before.num_decode_tokens,
            self.seconds - before.seconds,
        )

    @property
    def features(self) -> tuple[float, ...]:
        """What `_WORK` has a coefficient for."""
        return (
            self.num_steps,
            self.num_prompt_tokens,
            self.num_prompt_pairs,
            self.num_decode_tokens,
        )


class PoolModel:
    """Latency model shared by the workers of one role that may replace each other.

    Args:
        twin: a pool that computes prompts of the same model, for this one's decode workers or in a
            version before. What they take is as there until this one has computed some itself; else
            a pool thought slow would never be tried.
    """

    def __init__(self, twin: "PoolModel | None" = None) -> None:
        self._twin = twin
        self._num_prompt_tokens = 0
        self._log_level = 0.0  # the median of late reports, over what is expected
        self._connector = ""
        self._work = _Settled(_WORK)
        self._transfers: dict[str, _Settled] = {}
        # As long as nothing changes.
        self._rates: dict[tuple[tuple[float, ...], int, float, str], Rates] = {}

    def worked(self, work: WorkDone) -> float:
        """A worker has computed this. Returns the logarithm of how much slower that was than what
        others have taken of late."""
        expected = max(self._work.expected(work.features), _SHORTEST)
        surprise = math.log(work.seconds / expected) - self._log_level
        self._log_level += min(max(surprise, -_FOLLOWED), _FOLLOWED)
        self._num_prompt_tokens += work.num_prompt_tokens
        if self._work.observe(work.features, work.seconds):
            self._rates.clear()
        return surprise

    def received(self, num_tokens: float, exposed_seconds: float, connector: str) -> None:
        """The KV of so many tokens came by a connector; it was waited for so long."""
        self._connector = connector
        transfers = self._transfers.setdefault(connector, _Settled(_TRANSFER))
        if transfers.observe((1.0, num_tokens), max(exposed_seconds, _SHORTEST)):
            self._rates.clear()

    def rates(self, max_step_tokens: int, slowness: float, connector: str) -> Rates:
        """Of a worker with such steps that gets its blocks by this connector; if it has got none
        yet, by that of another one."""
        key = (self._prompt_values, max_step_tokens, slowness, connector or self._connector)
        if key not in self._rates:
            self._rates[key] = self._made(*key)
        return self._rates[key]

    @property
    def _prompt_values(self) -> tuple[float, ...]:
        """Seconds of a step, a token and a pair."""
        if self._twin is not None and self._num_prompt_tokens < _ENOUGH_TOKENS:
            return self._twin._prompt_values
        return self._work.values[:3]

    def _made(
        self, prompt: tuple[float, ...], max_step_tokens: int, slowness: float, connector: str
    ) -> Rates:
        step, token, pair = (slowness * c for c in prompt)
        transfers = self._transfers.get(connector)
        handoff, moved = _PRIOR_TRANSFER if transfers is None else transfers.values
        return Rates(
            prefill_seconds_per_step=step,
            prefill_seconds_per_token=token,
            attention_seconds_per_pair=pair,
            max_step_tokens=max_step_tokens,
            handoff_seconds=handoff,
            transfer_seconds_per_token=moved,
            interference_seconds_per_sequence=slowness * self._work.values[3] * STEPS_SLOWED,
            slowness=slowness,
        )


class _Settled:
    """A regression whose values are told anew only when they have moved: what hardly changes needs
    not be recorded, nor anything made of it again.

    Attributes:
        values: the coefficients as they were told last.
    """

    def __init__(self, coefficients: tuple[Coefficient, ...]) -> None:
        self._regression = Regression(coefficients)
        self._scales = [c.scale for c in coefficients]
        self.values = self._regression.values

    def expected(self, features: Sequence[float]) -> float:
        return self._regression.expected(features)

    def observe(self, features: Sequence[float], y: float) -> bool:
        """Takes in an observation. Returns whether the values have moved."""
        self._regression.observe(features, y)
        values = self._regression.values
        if all(map(_is_near, values, self.values, self._scales)):
            return False
        self.values = values
        return True


def _is_near(value: float, told: float, scale: float) -> bool:
    return abs(value - told) <= _MOVED * max(told, _MOVED * scale)


class WorkerModel:
    """Latency model of one worker, in one epoch.

    Args:
        max_step_tokens: tokens of its steps at most; 0: not known.

    Attributes:
        connector: by which blocks came last; empty: none has. Few workers ever use two.
        slowness: how much slower than its pool it is; 1 where that is hardly so.
    """

    def __init__(self, pool: PoolModel, max_step_tokens: int = 0) -> None:
        self.connector = ""
        self.slowness = 1.0
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._done = WorkDone()
        self._log_slowness = 0.0
        self._spread = _NOTICED  # the mean by which its reports differ from that

    @property
    def rates(self) -> Rates:
        return self._pool.rates(self._max_step_tokens, self.slowness, self.connector)

    def worked(self, done: WorkDone) -> None:
        """The worker has computed so much since it started. Of reports that overtake each other the
        late one says nothing new."""
        work = done.since(self._done)
        if work.num_steps <= 0 or work.seconds <= 0 or min(work.features) < 0:
            return
        self._done = done
        surprise = self._pool.worked(work) - self._log_slowness
        bounded = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._log_slowness += _WEIGHT * bounded
        self._spread += _WEIGHT * (abs(bounded) - self._spread)
        noticed, size = max(_NOTICED, self._spread), abs(self._log_slowness)
        if size < noticed / 2:
            self.slowness = 1.0
        elif abs(self._log_slowness - math.log(self.slowness)) > noticed:
            slowness = math.exp(min(self._log_slowness, _LARGEST))
            self.slowness = slowness if size > noticed else 1.0

    def received(self, num_tokens: float, exposed_seconds: float, connector: str) -> None:
        """The KV of so many tokens came by a connector; this worker waited for it so long after the
        prompt was computed."""
        self.connector = connector
        self._pool.received(num_tokens, exposed_seconds, connector)
