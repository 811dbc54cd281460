"""Grammar state of one sequence: the tokens allowed next, given the previous ones.

A sequence with a grammar has a `GrammarState`, which fills the bitmasks for its logits and accepts
the chosen tokens. End-of-sequence tokens are allowed only where the grammar may end. All states of
a request share its `GrammarBudget`. Independent of logits and steps.
"""

import math
import threading
import time
from collections.abc import Sequence
from typing import Final

from llguidance import LLMatcher

from baton.engine.executor.grammar.judge import GrammarLimits, reason_of
from baton.engine.executor.grammar.vocabulary import Mask, Vocabulary, is_allowed
from baton.errors import InvalidArgumentError

_MAX_RENEWALS: Final = 3
_LEXER_STATE_BYTES: Final = 550
# A lexer grows by a byte per 20 ns of computing, on a core of 2025; a faster one counts as well.
_GROWTH_BYTES_PER_S: Final = 100e6
# CPU seconds of a mask that adds no state to the lexer.
_CACHED_MASK_S: Final = 20e-6


class GrammarBudget:
    """CPU seconds that the grammar of one request may take, all its sequences together.

    Attributes:
        seconds: the whole budget.
        left_s: what is left of it; negative once it is spent.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self.left_s = seconds


class CompiledGrammar:
    """Compiled grammar that sequences can follow. Thread-safe.

    Its states share a lexer with a cache, so that most masks take microseconds. A lexer whose cache
    has reached its limit fails for all of them; then they get a new one.

    Attributes:
        problem: reason not to use it any more, if one was found after its trial.
        generation: number of lexers before the present one.
    """

    def __init__(
        self, native: str, num_bytes: int, vocabulary: Vocabulary, limits: GrammarLimits
    ) -> None:
        self._compiled_bytes = num_bytes
        self._lexer_bytes = limits.max_lexer_states * _LEXER_STATE_BYTES
        self._slow_s = 0.0
        self.problem: str | None = None
        self.vocabulary = vocabulary
        self.token_s = limits.token_s
        self._native = native
        self._native_limits = limits.native()
        self._lock = threading.Lock()
        self.generation = 0
        self._template = self._compile()
        if self._template.is_error():
            self.problem = reason_of(self._template.get_error())

    @property
    def num_bytes(self) -> int:
        """Memory that it holds: what its compilation took, and about what its lexer has cached
        since, by the time that this took."""
        grown = min(self._slow_s * _GROWTH_BYTES_PER_S, self._lexer_bytes)
        return self._compiled_bytes + int(grown)

    def note_cost(self, took_s: float) -> None:
        """Notes the CPU time of a mask or a token."""
        if took_s > _CACHED_MASK_S:
            self._slow_s += took_s

    def start(
        self,
        token_ids: Sequence[int] = (),
        field: str = "token_ids",
        budget: GrammarBudget | None = None,
    ) -> "GrammarState":
        """Returns the state after an output of `token_ids`, whose cost `budget` has, too.

        Raises `InvalidArgumentError`, naming `field`, if the grammar does not allow that output.
        """
        state = GrammarState(self, budget or GrammarBudget())
        for i, token_id in enumerate(token_ids):
            if not state.accept(token_id):
                problem = state.failure or "sampling.grammar does not allow it"
                raise InvalidArgumentError(field, f"token {i} of the output: {problem}")
        return state

    def for_request(self, seconds: float) -> "RequestGrammar":
        """Returns the grammar of one request, whose sequences may take `seconds` of CPU time."""
        return RequestGrammar(self, GrammarBudget(seconds))

    def matcher(self) -> tuple[LLMatcher, int]:
        """Returns a matcher at the start of the grammar, and the generation of its lexer."""
        with self._lock:
            return self._template.deep_copy(), self.generation

    def renew(self, generation: int) -> bool:
        """Compiles again for a new lexer. Returns False if `generation` is already replaced."""
        with self._lock:
            if generation != self.generation:
                return False
            self._template = self._compile()
            self.generation += 1
            return True

    def _compile(self) -> LLMatcher:
        tokenizer = self.vocabulary.tokenizer
        matcher = LLMatcher(tokenizer, self._native, log_level=0, limits=self._native_limits)
        # The first mask is the slowest; copies do not repeat it.
        matcher.compute_bitmask()
        return matcher


class RequestGrammar:
    """Compiled grammar of one request, with the budget that its sequences share."""

    def __init__(self, compiled: CompiledGrammar, budget: GrammarBudget) -> None:
        self._compiled = compiled
        self._budget = budget

    def start(self, token_ids: Sequence[int] = (), field: str = "token_ids") -> "GrammarState":
        """Returns the state of one of its sequences, as `CompiledGrammar.start`."""
        return self._compiled.start(token_ids, field, self._budget)


class GrammarState:
    """Grammar state of one sequence. Used by one thread at a time.

    Attributes:
        failure: reason for which the sequence has to end with an error, else None: the grammar
            allows no token, one token takes too much CPU time, or the budget is spent.
        mask_s: CPU seconds of its last masks.
        token_ids: the accepted tokens, without the ends.
    """

    def __init__(self, compiled: CompiledGrammar, budget: GrammarBudget) -> None:
        self.failure: str | None = None
        self.mask_s = 0.0
        self._compiled = compiled
        self._budget = budget
        self._vocabulary = compiled.vocabulary
        self._matcher, self._generation = compiled.matcher()
        self._num_renewals = 0
        self.token_ids: list[int] = []
        self._is_ended = False
        self._is_exhausted = False

    @property
    def is_finished(self) -> bool:
        """Whether only an end-of-sequence token can follow; exact after the mask is filled."""
        return self._is_ended or self._is_exhausted

    def accept(self, token_id: int) -> bool:
        """Appends a token. Returns False if it is not allowed; then at most `failure` changes."""
        if self._has_failed():
            return False
        if token_id in self._vocabulary.end_ids:
            self._is_ended = self._is_ended or self._matcher.is_accepting()
            return self._is_ended
        if self.is_finished or not 0 <= token_id < self._vocabulary.size:
            return False
        return self._consume(token_id)

    def fill_masks(self, draft_token_ids: Sequence[int], rows: Mask) -> int:
        """Fills the masks of the next token and of the token after each draft. Keeps the state.

        Args:
            rows: `[len(draft_token_ids) + 1, mask_words(vocab_size)]`. Rows after the first draft
                that is not allowed are unchanged.

        Returns the number of rows filled: one more than the number of allowed drafts.
        """
        assert len(rows) == len(draft_token_ids) + 1
        self.mask_s = 0.0
        self.fill_mask(rows[0])
        if self.failure is not None:
            return 1
        num_tokens = len(self.token_ids)
        was_ended, was_exhausted = self._is_ended, self._is_exhausted
        num_filled = 1
        for token_id in draft_token_ids:
            if not is_allowed(rows[num_filled - 1], token_id) or not self.accept(token_id):
                break
            self.fill_mask(rows[num_filled])
            num_filled += 1
        self._rewind(num_tokens)
        self._is_ended, self._is_exhausted = was_ended, was_exhausted
        return num_filled

    def fill_mask(self, row: Mask) -> None:
        """Fills the mask of the next token; after a failure, with end-of-sequence tokens.

        Args:
            row: `[mask_words(vocab_size)]`.
        """
        while not self._has_failed() and not self.is_finished:
            began_s = time.thread_time()
            self._vocabulary.fill(self._matcher, row)
            took_s = time.thread_time() - began_s
            self.mask_s += took_s
            self._charge(took_s)
            if self.failure is not None:
                break
            if not self._matcher.is_error():
                self._add_ends(row)
                return
            self._recover()
        row[:] = self._vocabulary.ends

    def _has_failed(self) -> bool:
        """Returns whether the sequence has failed, by now or as another one found the cause."""
        if self.failure is None:
            self.failure = self._compiled.problem
        return self.failure is not None

    def _consume(self, token_id: int) -> bool:
        while not self._has_failed():
            began_s = time.thread_time()
            is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
            self._charge(time.thread_time() - began_s)
            if not self._matcher.is_error():
                if is_accepted:
                    self.token_ids.append(token_id)
                    self._is_exhausted = self._matcher.is_stopped()
                return is_accepted
            self._recover()
        return False

    def _add_ends(self, row: Mask) -> None:
        may_end = self._matcher.is_accepting()
        if not row.any():
            self._is_exhausted = may_end
            if not may_end:
                self.failure = "no token of the model can continue what the grammar has matched"
        if may_end or self.failure is not None:
            row |= self._vocabulary.ends

    def _charge(self, took_s: float) -> None:
        """Fails if one token, or the request, took too long; a trial cannot reach every part of a
        grammar."""
        self._budget.left_s -= took_s
        self._compiled.note_cost(took_s)
        if took_s > self._compiled.token_s:
            self.failure = f"takes {1000 * took_s:.0f} ms of computing for one token"
            self._compiled.problem = self.failure
        elif self._budget.left_s < 0:
            self.failure = (
                f"took more than {self._budget.seconds:g} s of computing for this request "
                "(--max-grammar-s)"
            )

    def _recover(self) -> None:
        """Recovers from a matcher error with a new lexer if the lexer failed, else fails."""
        reason = reason_of(self._matcher.get_error())
        if not reason.startswith("lexer error") or self._num_renewals == _MAX_RENEWALS:
            self.failure = self.failure or reason
            return
        began_s = time.thread_time()
        self._num_renewals += self._compiled.renew(self._generation)
        self._replay()
        self._budget.left_s -= time.thread_time() - began_s

    def _rewind(self, num_tokens: int) -> None:
        """Undoes the tokens after the first `num_tokens`, and a failure that they caused."""
        num_back = len(self.token_ids) - num_tokens
        del self.token_ids[num_tokens:]
        if self.failure is not None or (num_back and not self._matcher.rollback(num_back)):
            self.failure = None
            self._replay()

    def _replay(self) -> None:
        self._matcher, self._generation = self._compiled.matcher()
        if self._matcher.try_consume_tokens(self.token_ids) != len(self.token_ids):
            self.failure = reason_of(self._matcher.get_error())
