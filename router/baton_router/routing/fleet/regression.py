"""Online linear regression: bounded, robust, with exponential forgetting. Pure.

Minimizes the squared relative errors, so that short and long observations count equally, with
weights that decay per observation. Coefficients stay within bounds; one that the observations do
not determine stays at its prior. An outlier, by the mean error of recent observations, has a small
weight, unless further ones confirm it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

_KEPT = 0.98  # factor by which past observations decay with each new one
_PRIOR_WEIGHT = 1e-5  # relative to an observation: decides only what observations do not determine
_SWEEPS = 12
_TOLERATED = 2.0  # errors up to this many spreads have full weight
_LEAST_SPREAD = 0.05
_SPREAD_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Coefficient:
    """Prior and bounds of one coefficient.

    Attributes:
        prior: value before any observation.
        scale: likely order of magnitude; greater than 0.
        largest: upper bound.
        least: lower bound; never negative.
    """

    prior: float
    scale: float
    largest: float
    least: float = 0.0


class Regression:
    """Linear model: y = sum of coefficients times features."""

    def __init__(self, coefficients: Sequence[Coefficient]) -> None:
        self._coefficients = tuple(coefficients)
        size = len(self._coefficients)
        # All in units of the scales: the equations are matrix @ x = vector.
        self._priors = [c.prior / c.scale for c in self._coefficients]
        self._largest = [c.largest / c.scale for c in self._coefficients]
        self._least = [c.least / c.scale for c in self._coefficients]
        self._matrix = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._solution = list(self._priors)
        self._spread = 1.0

    @property
    def values(self) -> tuple[float, ...]:
        """The coefficients, in order."""
        return tuple(x * c.scale for x, c in zip(self._solution, self._coefficients, strict=True))

    def expected(self, features: Sequence[float]) -> float:
        """Returns the model's prediction for `features`."""
        return sum(f * c for f, c in zip(features, self.values, strict=True))

    def observe(self, features: Sequence[float], y: float) -> None:
        """Adds one observation; `features` not negative and not all 0, `y` greater than 0."""
        scaled = [f * c.scale for f, c in zip(features, self._coefficients, strict=True)]
        expected = sum(f * x for f, x in zip(scaled, self._solution, strict=True))
        size = max(y, expected)
        error = abs(y - expected) / size
        weight = min(1.0, _TOLERATED * self._spread / error) if error else 1.0
        self._spread += _SPREAD_WEIGHT * (max(error, _LEAST_SPREAD) - self._spread)
        self._add([f / size for f in scaled], y / size, weight)
        self._solve()

    def _add(self, features: list[float], y: float, weight: float) -> None:
        for i, row in enumerate(self._matrix):
            weighted = weight * features[i]
            for j, other in enumerate(features):
                row[j] = _KEPT * row[j] + weighted * other
            self._vector[i] = _KEPT * self._vector[i] + weighted * y

    def _solve(self) -> None:
        """Runs coordinate descent from the last solution, within the bounds, until it converges."""
        solution = self._solution
        for _ in range(_SWEEPS):
            before = solution.copy()
            for i, row in enumerate(self._matrix):
                others = sum(map(mul, row, solution)) - row[i] * solution[i]
                right = self._vector[i] - others + _PRIOR_WEIGHT * self._priors[i]
                best = right / (row[i] + _PRIOR_WEIGHT)
                solution[i] = min(max(best, self._least[i]), self._largest[i])
            if solution == before:
                return
