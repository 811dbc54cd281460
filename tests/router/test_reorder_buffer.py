import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import UnavailableError
from baton_router.lifecycle.reorder_buffer import ReorderBuffer, Token


def token(position: int) -> Token:
    return Token(position, 100 + position, None)


def positions(tokens: list[Token]) -> list[int]:
    return [t.position for t in tokens]


def test_reorder_buffer_keeps_first_of_two_tokens_at_position():
    assembly = ReorderBuffer()
    assembly.accept([Token(1, 7, -1.0)])
    ready = assembly.accept([Token(1, 8, None), token(0)])
    assert [t.token_id for t in ready] == [100, 7]


def test_reorder_buffer_fails_when_repeated_token_differs():
    assembly = ReorderBuffer()
    assembly.accept([token(0), token(1)])
    with pytest.raises(UnavailableError, match="position 1 of the output is token 7, after 101"):
        assembly.accept([Token(1, 7, None)])


def test_reorder_buffer_forgets_early_tokens_only():
    assembly = ReorderBuffer()
    assembly.accept([token(0), token(2)])
    assembly.forget_early()
    assert not assembly.has_gap
    assert positions(assembly.accept([Token(1, 7, None), Token(2, 8, None)])) == [1, 2]
    assert assembly.token_ids == [100, 7, 8]


@given(st.integers(0, 20), st.lists(st.integers(0, 19), max_size=20), st.randoms())
def test_reorder_buffer_emits_each_token_once_in_any_order(length, repeated, shuffled):
    arriving = [*range(length), *(p for p in repeated if p < length)]
    shuffled.shuffle(arriving)
    assembly = ReorderBuffer()
    out: list[Token] = []
    arrived: set[int] = set()
    while arriving:
        size = shuffled.randint(1, len(arriving))
        out += assembly.accept([token(p) for p in arriving[:size]])
        arrived.update(arriving[:size])
        del arriving[:size]
        assert positions(out) == list(range(len(out)))
        assert assembly.has_gap == (len(arrived) > len(out))
    assert positions(out) == list(range(length))
    assert not assembly.has_gap
