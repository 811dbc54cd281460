"""Recognition of mask rules; all others are refused."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from baton.engine.executor.attention.mask_rule import MaskRule, recognise
from baton.errors import UnsupportedModelError

Mask = Callable[[int, int, Any, Any], Any]


@given(st.integers(1, 300))
def test_recognise_accepts_a_causal_mask_of_any_length(max_len):
    assert recognise(causal_mask_function, max_len) == MaskRule()


@given(st.integers(1, 80), st.integers(1, 80))
def test_recognise_finds_a_window_shorter_than_the_model_length(window, max_len):
    expected = MaskRule(window if window < max_len else None)
    assert recognise(sliding_window_causal_mask_function(window), max_len) == expected


def dilated(_batch: int, _head: int, query: Any, key: Any) -> Any:
    return (key <= query) & ((query - key) % 2 == 0)


def prefix_bidirectional(_batch: int, _head: int, query: Any, key: Any) -> Any:
    return (key <= query) | (key < 5)


def blind(_batch: int, _head: int, query: Any, key: Any) -> Any:
    return key < query


def two_faced(_batch: int, _head: int, query: Any, key: Any) -> Any:
    """A window, and the first four tokens for ever."""
    return (key <= query) & ((key > query - 9) | (key < 4))


def by_head(_batch: int, head: Any, query: Any, key: Any) -> Any:
    return torch.zeros(1)[head + 1] + (key <= query)


@pytest.mark.parametrize("max_len", [64, 65, 100])
@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(64 // 2, torch.zeros(1, dtype=torch.int64)),
        dilated,
        prefix_bidirectional,
        blind,
        two_faced,
        by_head,
        and_masks(causal_mask_function, packed_sequence_mask_function(torch.zeros(1, 4))),
    ],
)
def test_recognise_rejects_any_other_mask(mask, max_len):
    with pytest.raises(UnsupportedModelError, match="attention mask"):
        recognise(mask, max_len)


@given(st.integers(1, 40), st.integers(1, 120))
def test_recognise_accepts_chunked_masks_only_if_plain_causal(chunk, max_len):
    mask = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    if max_len <= chunk:
        assert recognise(mask, max_len) == MaskRule()
    elif chunk == 1:
        assert recognise(mask, max_len) == MaskRule(1)
    else:
        with pytest.raises(UnsupportedModelError):
            recognise(mask, max_len)
