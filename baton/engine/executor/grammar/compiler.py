"""Grammar compiler for JSON schemas, regular expressions and EBNF, by llguidance.

A JSON schema allows any whitespace between its tokens, and properties only in the schema's order;
its key `x-guidance` changes the former. A regular expression matches the whole output, with or
without anchors. EBNF is llguidance's dialect of Lark, or llama.cpp's GBNF (`root ::= ...`).
Sequences begin with `CompiledGrammar.start`.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.engine.executor.grammar.cache import GrammarCache, GrammarKey
from baton.engine.executor.grammar.judge import GrammarLimits, reason_of
from baton.engine.executor.grammar.state import CompiledGrammar
from baton.engine.executor.grammar.trial import Trials
from baton.engine.executor.grammar.vocabulary import Vocabulary
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar

_FIELD: Final = "sampling.grammar"


class GrammarCompiler:
    """Grammar compiler of one model, with a cache. Thread-safe.

    Each grammar first passes a trial in a separate process (`trial`), which starts with the first
    grammar. So `compile` blocks, but no other thread, and no grammar crashes the engine.
    """

    def __init__(
        self,
        tokenizer_folder: str | Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        limits: GrammarLimits | None = None,
        cache_size: int = 128,
        cache_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the tokenizer, which holds the GIL for 0.5 s per 100,000 tokens. Without a usable
        one, every grammar is rejected.

        Args:
            vocab_size: size of the model's vocabulary, the length of its logits.
            cache_size: maximum number of cached grammars.
            cache_bytes: maximum bytes that they hold; one that is compiled to over a quarter is not
                cached.
        """
        self._limits = limits or GrammarLimits()
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._cache: GrammarCache[CompiledGrammar | _Refusal] = GrammarCache(
            cache_size, cache_bytes, clock
        )
        self._compiling: dict[GrammarKey, Future[CompiledGrammar | _Refusal]] = {}
        self._vocabulary: Vocabulary | None = None
        self._unusable = ""
        file = Path(tokenizer_folder) / "tokenizer.json"
        try:
            self._vocabulary = Vocabulary(file, vocab_size, eos_token_ids)
        except ValueError as error:
            problem = str(error).replace(str(file), file.name)
            self._unusable = f"cannot be used with this model: {reason_of(problem)}"
        else:
            self._trials = Trials(file, self._vocabulary.mark_ids, self._limits)

    @property
    def trial_pid(self) -> int | None:
        """Id of the process in which grammars are tried; None before the first."""
        return None if self._vocabulary is None else self._trials.pid

    def is_cached(self, grammar: Grammar, salt: bytes = b"") -> bool:
        """Returns whether the outcome of a grammar, or its refusal, is kept."""
        with self._lock:
            return self._cache.get(GrammarKey(grammar, salt)) is not None

    def compile(self, grammar: Grammar, salt: bytes = b"", tenant: str = "") -> CompiledGrammar:
        """Compiles a grammar, or returns it from the cache. Equal grammars of one salt are compiled
        once, even if requested concurrently. Raises `InvalidArgumentError` with the reason, or
        `OverloadedError`.

        Args:
            tenant: holder of what is cached.
        """
        key = GrammarKey(grammar, salt)
        with self._lock:
            self._cache.trim()  # what is cached has grown
            found = self._cache.get(key)
            if found is not None:
                return _unless_refused(found)
            future = self._compiling.get(key)
            is_first = future is None
            if future is None:
                future = self._compiling[key] = Future()
        if is_first:
            self._compile_first(key, tenant, future)
        return _unless_refused(future.result())

    def close(self) -> None:
        """Ends the trial process, as the garbage collector would."""
        if self._vocabulary is not None:
            self._trials.close()

    def _compile_first(
        self, key: GrammarKey, tenant: str, future: "Future[CompiledGrammar | _Refusal]"
    ) -> None:
        try:
            outcome, seconds = self._try_and_compile(key.grammar)
        except BaseException as error:
            with self._lock:
                del self._compiling[key]
            future.set_exception(error)
            return
        with self._lock:
            del self._compiling[key]
            if seconds:
                self._cache.put(key, outcome, tenant, seconds)
        future.set_result(outcome)

    def _try_and_compile(self, grammar: Grammar) -> "tuple[CompiledGrammar | _Refusal, float]":
        """Returns the outcome, and for how many seconds to cache it."""
        if self._vocabulary is None:
            return _Refusal(self._unusable), 0.0
        result = self._trials.run(grammar)
        if result.problem is not None:
            return _Refusal(result.problem, result.field or _FIELD), result.valid_s
        native, num_bytes = result.native, result.num_bytes
        compiled = CompiledGrammar(native, num_bytes, self._vocabulary, self._limits)
        return compiled, math.inf if num_bytes <= self._cache_bytes // 4 else 0.0


@dataclass(frozen=True, slots=True)
class _Refusal:
    problem: str
    field: str = _FIELD
    num_bytes: int = 0


def _unless_refused(outcome: "CompiledGrammar | _Refusal") -> CompiledGrammar:
    if isinstance(outcome, _Refusal):
        raise InvalidArgumentError(outcome.field, outcome.problem)
    if outcome.problem is not None:
        raise InvalidArgumentError(_FIELD, outcome.problem)
    return outcome
