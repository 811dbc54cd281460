"""Prompt lookup against the same rule written as a search through all places."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import event, given, settings

from baton.engine.scheduler.sequences import prompt_lookup
from baton.engine.scheduler.sequences.prompt_lookup import (
    Drafter,
    DraftRequest,
    NgramDrafter,
    TokenArray,
    propose,
)


def history(*token_ids: int) -> TokenArray:
    return np.array(token_ids, np.int32)


def expected(token_ids: list[int], min_match: int, max_match: int, max_drafts: int) -> list[int]:
    """Longest match first, then latest; the drafts are read on into themselves."""
    for length in range(max_match, min_match - 1, -1):
        suffix = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == suffix:
                text = list(token_ids)
                for i in range(max_drafts):
                    text.append(text[start + length + i])
                return text[len(token_ids) :]
    return []


@settings(max_examples=500)
@given(
    token_ids=st.lists(st.integers(0, 3), max_size=40),
    min_match=st.integers(1, 4),
    extra_match=st.integers(0, 6),
    max_drafts=st.integers(0, 9),
)
def test_propose_equals_an_exhaustive_search(token_ids, min_match, extra_match, max_drafts):
    max_match = min_match + extra_match
    drafts = propose(history(*token_ids), min_match, max_match, max_drafts)
    assert drafts.dtype == np.int32
    assert drafts.tolist() == expected(token_ids, min_match, max_match, max_drafts)
    assert len(drafts) in (0, max_drafts)
    event(f"any drafts: {len(drafts) > 0}")


def test_propose_returns_drafts_that_do_not_alias_the_history():
    text = history(5, 6, 70, 80, 5, 6)
    drafts = propose(text, 2, 4, 2)
    text[:] = 0
    assert drafts.tolist() == [70, 80]


def test_propose_considers_only_the_latest_occurrences():
    followers = range(100, 100 + 2 * prompt_lookup.MAX_EXTENDED)
    text = [token_id for follower in followers for token_id in (7, 8, follower)]
    assert propose(history(*text, 7, 8), 1, 4, 1).tolist() == [followers[-1]]


def test_propose_terminates_on_a_single_repeated_token():
    """More occurrences than are told apart by their length."""
    assert propose(np.zeros(3 * prompt_lookup.MAX_EXTENDED, np.int32), 2, 16, 4).tolist() == [0] * 4


def test_ngram_drafter_answers_requests_in_order():
    drafter: Drafter = NgramDrafter(min_match=2, max_match=4)
    requests = [
        DraftRequest("a", history(5, 6, 70, 0, 5, 6), 2),
        DraftRequest("b", history(1, 2, 3), 2),
        DraftRequest("c", history(5, 6, 70, 0, 5, 6), 1),
        DraftRequest("d", history(5, 6, 70, 0, 5, 6), 0),
    ]
    assert [drafts.tolist() for drafts in drafter.propose(requests)] == [[70, 0], [], [70], []]


@pytest.mark.parametrize(("min_match", "max_match"), [(0, 3), (4, 3)])
def test_ngram_drafter_rejects_invalid_match_lengths(min_match, max_match):
    with pytest.raises(AssertionError):
        NgramDrafter(min_match=min_match, max_match=max_match)
