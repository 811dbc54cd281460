"""Costs of grammars in steps: bounds of one mask, of one token and of one request."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

import baton.models
from baton.engine.executor.grammar.judge import GrammarLimits, _to_native
from baton.engine.executor.grammar.state import CompiledGrammar, GrammarState
from baton.engine.executor.grammar.vocabulary import Mask, Vocabulary, mask_words
from baton.errors import InvalidArgumentError
from baton.sampling import Grammar, GrammarKind

VOCAB_SIZE = 3072
ENDS = frozenset({0, 2})
LETTERS = Grammar(GrammarKind.REGEX, "[a-z]{1000}")
# A trial, which tries a few tokens, sees only the literal prefix.
AMBIGUOUS = Grammar(
    GrammarKind.EBNF,
    f'root ::= "{"x" * 60}" s\ns ::= s s s | s s | "a" | "b" | s "c" s | ""',
)

Compile = Callable[..., CompiledGrammar]


@pytest.fixture(scope="module")
def compiled() -> Compile:
    """Compiles a grammar without a trial."""
    folder = Path(baton.models.locate("tiny"))
    vocabulary = Vocabulary(folder / "tokenizer.json", VOCAB_SIZE, ENDS)

    def compile_grammar(grammar: Grammar, **limits: float) -> CompiledGrammar:
        return CompiledGrammar(_to_native(grammar), 0, vocabulary, GrammarLimits(**limits))

    return compile_grammar


def mask_of(state: GrammarState) -> set[int]:
    row: Mask = np.zeros(mask_words(VOCAB_SIZE), np.int32)
    state.fill_mask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def walk(state: GrammarState, num_tokens: int) -> int:
    """Appends random tokens that the grammar allows. Returns how many, up to a failure."""
    draws = random.Random(1)
    for i in range(num_tokens):
        tokens = sorted(mask_of(state) - ENDS)
        if state.failure is not None or not tokens:
            return i
        state.accept(draws.choice(tokens))
    return num_tokens


def test_ambiguous_grammar_fails_before_its_masks_are_slow(compiled):
    state = compiled(AMBIGUOUS, token_s=60.0).start()
    assert walk(state, 120) < 120
    assert "Too many items (limit 3000" in state.failure


def test_mask_beyond_token_bound_fails_its_sequence(compiled):
    grammar = compiled(LETTERS, token_s=0.0)
    state = grammar.start()
    assert mask_of(state) == ENDS
    assert "ms of computing for one token" in state.failure
    assert not state.accept(5)
    with pytest.raises(InvalidArgumentError, match="ms of computing for one token"):
        grammar.start([5])


def test_sequences_of_slow_grammar_fail_without_another_mask(compiled):
    grammar = compiled(LETTERS)
    first, second = grammar.start(), grammar.start()
    assert mask_of(first) - ENDS
    grammar.problem = "takes 500 ms of computing for one token"
    assert mask_of(second) == ENDS
    assert second.failure == grammar.problem


def test_sequences_of_request_share_its_budget(compiled):
    grammar = compiled(LETTERS)
    wide, narrow = grammar.for_request(1000.0), grammar.for_request(0.0)
    first, second = narrow.start(), narrow.start()
    assert mask_of(first) == mask_of(second) == ENDS
    assert first.failure == second.failure
    assert "took more than 0 s of computing for this request (--max-grammar-s)" in first.failure
    assert walk(wide.start(), 20) == 20
    with pytest.raises(InvalidArgumentError, match="--max-grammar-s"):
        narrow.start([5])


def test_compiled_grammar_counts_what_its_lexer_has_cached(compiled):
    """Resident memory is measured by the page, with noise: a third is far more than nothing."""
    grammars = [compiled(Grammar(GrammarKind.REGEX, f"(.*[a-m]b.{{150}}){{5}}{i}")) for i in "abcd"]
    before = psutil.Process().memory_info().rss
    assert sum(grammar.num_bytes for grammar in grammars) == 0
    for grammar in grammars:
        walk(grammar.start(), 700)
    grown = psutil.Process().memory_info().rss - before
    counted = sum(grammar.num_bytes for grammar in grammars)
    assert counted > 4 << 20
    assert counted > grown // 3
    assert counted <= len(grammars) * 20_000 * 550
