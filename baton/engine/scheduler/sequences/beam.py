"""Beam search, as in transformers 5.23: selects running beams, finished hypotheses and the end.

Knows token ids and their log-probabilities; nothing of models, blocks or forks. All scores are
float32 and are added in transformers' order, so equal inputs give equal outputs.

    score of a hypothesis = sum of its log-probabilities / (its output tokens) ** length_penalty

The output tokens count the end-of-sequence token and not the prompt. Both differences come from
transformers' placeholder score of -1e9: here a candidate of -inf (forbidden by a processor) never
becomes a beam, so there may be fewer beams and results than `width`; and no hypothesis is dropped
because its score is below -1e9, as a penalty far below 0 can make it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.sampling import EarlyStopping

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Continuation of the running beam `parent` (its index in the step before) with `token_id`."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Ending:
    """End of the running beam `parent` with `token_id`; `score` includes the length penalty."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """Decision of one beam search step.

    Attributes:
        beams: the running beams of the next step, best first: at most `width`, none if `is_done`. A
            parent may occur several times, or not at all.
        finished: the hypotheses that ended in this step, best first. A hypothesis that scores below
            `width` others is not among the results.
        is_done: no further step will change the results.
    """

    beams: tuple[Continuation, ...]
    finished: tuple[Ending, ...]
    is_done: bool


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Finished output.

    Attributes:
        token_ids: the output, its end-of-sequence token included.
        logprobs: log-probability of each token, in nats, as passed to `advance`.
        score: the sum of the scores under the length penalty; best is largest.
        was_cut: it ended at `max_tokens`; else with one of the end-of-sequence tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    score: float
    was_cut: bool


@dataclass(frozen=True, slots=True)
class _Candidates:
    """Best continuations of all beams, best first: one element of each array per candidate."""

    parents: npt.NDArray[np.intp]
    token_ids: npt.NDArray[np.int32]
    logprobs: FloatArray
    sums: FloatArray

    def at(self, ranks: npt.NDArray[np.intp]) -> "_Candidates":
        return _Candidates(
            self.parents[ranks], self.token_ids[ranks], self.logprobs[ranks], self.sums[ranks]
        )

    def continuations(self) -> tuple[Continuation, ...]:
        return tuple(map(Continuation, self.parents.tolist(), self.token_ids.tolist()))


@dataclass(frozen=True, slots=True)
class _Beams:
    """Running beams; n is their number of output tokens."""

    token_ids: npt.NDArray[np.int32]  # [num_running, n]
    logprobs: FloatArray  # [num_running, n]
    sums: FloatArray  # [num_running]

    def extend(self, chosen: _Candidates) -> "_Beams":
        """Returns the beams that the chosen candidates make of these."""
        return _Beams(
            np.column_stack((self.token_ids[chosen.parents], chosen.token_ids)),
            np.column_stack((self.logprobs[chosen.parents], chosen.logprobs)),
            chosen.sums,
        )


class BeamSearch:
    """Beam search of one request: starts with one running beam, the prompt; `advance` steps it."""

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        eos_token_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        """Limits the output to `max_tokens`; `eos_token_ids` end a hypothesis before."""
        assert width >= 1, "a search without beams"
        assert max_tokens >= 1, "a search without tokens"
        self._width = width
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._eos_token_ids = frozenset(eos_token_ids)
        self._eos_array = np.array(sorted(self._eos_token_ids), dtype=np.int32)
        self._max_tokens = max_tokens
        self._running = _Beams(
            np.empty((1, 0), np.int32), np.empty((1, 0), np.float32), np.zeros(1, np.float32)
        )
        self._finished: list[Hypothesis] = []  # best first, at most `width`
        self._is_done = False

    @property
    def num_candidates(self) -> int:
        """Continuations that `advance` needs of each beam; all of a vocabulary that has fewer.

        Enough that `width` beams keep running even if each beam ends with each of its
        end-of-sequence tokens.
        """
        return max(2, 1 + len(self._eos_token_ids)) * self._width

    @property
    def num_running(self) -> int:
        """Rows that the next `advance` takes: 1 at first, 0 when the search is done."""
        return len(self._running.sums)

    @property
    def is_done(self) -> bool:
        return self._is_done

    def advance(
        self, token_ids: IntArray, scores: FloatArray, logprobs: FloatArray | None = None
    ) -> BeamStep:
        """Takes the best continuations of each running beam and selects the next beams.

        Args:
            token_ids: [num_running, k], in each row the `num_candidates` with the highest scores.
                Row i belongs to `beams[i]` of the step before.
            scores: [num_running, k], float32, log-probabilities in nats after all processors,
                without the beam's own sum. -inf is forbidden, and may pad a short row.
            logprobs: [num_running, k], the values that hypotheses report; None is `scores`.

        Equal sums are ordered by beam, then by token id; transformers leaves their order open.
        """
        assert not self._is_done, "advance() of a search that is done"
        assert scores.dtype == np.float32, "scores that are not float32"
        assert token_ids.shape == scores.shape, "token ids and scores differ in shape"
        assert len(scores) == self.num_running, "not one row per running beam"
        best = self._select(token_ids, scores, scores if logprobs is None else logprobs)
        num_tokens = self._running.token_ids.shape[1] + 1
        is_eos = np.isin(best.token_ids, self._eos_array)
        ends = is_eos | (num_tokens == self._max_tokens)
        # Endings ranked below `width` are dropped; only the continuations were needed there.
        finished = self._finish(best.at(np.flatnonzero(ends[: self._width])), num_tokens)
        going_on = best.at(np.flatnonzero(~ends)[: self._width])
        if self._is_over(going_on.sums, num_tokens):
            self._is_done = True
            going_on = going_on.at(np.empty(0, np.intp))
        self._running = self._running.extend(going_on)
        return BeamStep(going_on.continuations(), finished, self._is_done)

    def results(self, n: int) -> tuple[Hypothesis, ...]:
        """Returns the best `n` hypotheses, best first; fewer only if all others were forbidden."""
        assert self._is_done, "results() of a search that is not done"
        assert n <= self._width, "more results than beams"
        return tuple(self._finished[:n])

    def _select(self, token_ids: IntArray, scores: FloatArray, logprobs: FloatArray) -> _Candidates:
        """Returns the best `num_candidates` over all beams, best first, without forbidden ones."""
        sums = (scores + self._running.sums[:, None]).ravel()
        tokens = token_ids.astype(np.int32).ravel()
        parents = np.repeat(np.arange(self.num_running), scores.shape[1])
        order = np.lexsort((tokens, parents, -sums))[: self.num_candidates]
        order = order[sums[order] > -np.inf]
        return _Candidates(
            parents[order], tokens[order], logprobs.astype(np.float32).ravel()[order], sums[order]
        )

    def _finish(self, ending: _Candidates, num_tokens: int) -> tuple[Ending, ...]:
        """Adds the `ending` candidates to the finished hypotheses and keeps the best `width`.

        An older hypothesis precedes a newer one with the same score.
        """
        outputs = self._running.extend(ending)
        scores = self._penalized(ending.sums, num_tokens)
        for token_ids, logprobs, score in zip(
            outputs.token_ids.tolist(), outputs.logprobs.tolist(), scores.tolist(), strict=True
        ):
            was_cut = token_ids[-1] not in self._eos_token_ids
            self._finished.append(Hypothesis(tuple(token_ids), tuple(logprobs), score, was_cut))
        self._finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self._finished[self._width :]
        parts = (ending.parents.tolist(), ending.token_ids.tolist(), scores.tolist())
        return tuple(map(Ending, *parts))

    def _is_over(self, going_on: FloatArray, num_tokens: int) -> bool:
        """Returns True if no running beam is left or expected to get among the results.

        Follows `_check_early_stop_heuristic` and `_beam_search_has_unfinished_sequences` of
        transformers: the best running beam is compared as if it ended with its present sum, at its
        present length; for `NEVER` at the length that would suit it best.
        """
        if not len(going_on):
            return True
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is EarlyStopping.FIRST:
            return True
        likes_length = self._length_penalty > 0.0
        waits = self._early_stopping is EarlyStopping.NEVER and likes_length
        hypothetical = self._max_tokens if waits else num_tokens
        best_possible = float(self._penalized(going_on[:1], hypothetical)[0])
        return best_possible <= self._finished[-1].score

    def _penalized(self, sums: FloatArray, num_tokens: int) -> FloatArray:
        """Returns sum / num_tokens ** length_penalty; the divisor is float64 rounded to float32.

        A divisor that is 0 or infinite in float32 gives a score of -inf or -0, as in transformers.
        """
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            divisor = np.float32(float(num_tokens) ** self._length_penalty)
            return sums / divisor
