from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import UnavailableError
from baton_router.call.tokens import Tokens, TopLogprobs
from baton_router.lifecycle.answers.reorder_buffer import ReorderBuffer


def tokens(begin: int, end: int) -> Tokens:
    """Tokens with log-probabilities, all told by their positions."""
    positions = range(begin, end)
    return Tokens(
        begin,
        [100 + position for position in positions],
        [-float(position) for position in positions],
        [TopLogprobs((position,), (-1.0,)) for position in positions],
    )


def test_reorder_buffer_keeps_first_of_two_tokens_at_position():
    assembly = ReorderBuffer()
    assembly.accept(Tokens(1, [7]))
    ready = assembly.accept(Tokens(0, [100, 8]))
    assert ready.token_ids == [100, 7]


def test_reorder_buffer_fails_when_repeated_token_differs():
    assembly = ReorderBuffer()
    assembly.accept(tokens(0, 2))
    with pytest.raises(UnavailableError, match="position 1 of the output is token 7, after 101"):
        assembly.accept(Tokens(1, [7]))


def test_reorder_buffer_forgets_early_tokens_only():
    assembly = ReorderBuffer()
    assembly.accept(tokens(0, 1))
    assembly.accept(tokens(2, 3))
    assembly.forget_early()
    assert not assembly.has_gap
    assert assembly.accept(Tokens(1, [7, 8])) == Tokens(1, [7, 8])
    assert assembly.token_ids == [100, 7, 8]


@given(
    st.lists(st.integers(0, 20), max_size=8).map(lambda ends: sorted({0, *ends})),
    st.data(),
    st.randoms(),
)
def test_reorder_buffer_emits_each_token_once_in_any_order(ends, data, shuffled):
    length = ends[-1]
    arriving = list(pairwise(ends))
    for _ in range(data.draw(st.integers(0, 5))):  # again, cut elsewhere
        begin = data.draw(st.integers(0, length))
        arriving.append((begin, data.draw(st.integers(begin, length))))
    shuffled.shuffle(arriving)
    assembly, out, arrived = ReorderBuffer(), tokens(0, 0), set()
    for begin, end in arriving:
        out.extend(assembly.accept(tokens(begin, end)))
        arrived.update(range(begin, end))
        assert out == tokens(0, len(out))
        assert assembly.has_gap == (len(arrived) > len(out))
    assert out == tokens(0, length)
    assert assembly.token_ids == out.token_ids
