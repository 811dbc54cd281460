"""Attention by the tilings that are chosen for a GPU, over contexts of many tiles, against float64.

Other tests choose small tilings, in which few tokens have many edges.
"""

import itertools
from typing import Any

import pytest
import torch

from baton_kernels.attention.inputs import HEAD_DIMS
from baton_kernels.attention.tiling import AttentionTiling, choose_tiling
from tests.support.kernels.attention_cases import (
    Case,
    attend,
    by_descriptors,
    make_case,
    prefill,
    share,
)
from tests.support.kernels.comparison import FP8

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Form = tuple[int, str, str, bool]
"""Head dimension, dtype of the cache, rule of the scores, whether the tiling is deterministic."""

CACHES: dict[str, tuple[torch.dtype, bool]] = {
    "bfloat16": (torch.bfloat16, False),
    "float16": (torch.float16, False),
    "float8": (torch.bfloat16, True),
    "float32": (torch.float32, False),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ruled": {"window": 300, "softcap": 20.0, "has_sinks": True},
}

FORMS = list(itertools.product(HEAD_DIMS, CACHES, RULES, (False, True)))
BY_DESCRIPTORS = [form for form in FORMS if form[1] != "float32"]  # of 16 and 8 bits
SHARING = [form for form in FORMS if form[2:] == ("plain", False)]  # neither windowed nor bitwise


def tiling_of(form: Form) -> AttentionTiling:
    head_dim, cache, _rule, is_deterministic = form
    dtype, is_fp8 = CACHES[cache]
    cache_dtype = FP8 if is_fp8 else dtype
    return choose_tiling(head_dim, dtype, cache_dtype, 1, deterministic=is_deterministic)


def batch(form: Form, contexts: list[int], num_queries: list[int], block_size: int = 16) -> Case:
    head_dim, cache, rule, _is_deterministic = form
    dtype, is_fp8 = CACHES[cache]
    shape = {"dtype": dtype, "head_dim": head_dim, "group": 4, "num_kv_heads": 1, "is_fp8": is_fp8}
    return make_case(contexts, num_queries, block_size=block_size, **shape, **RULES[rule])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_chosen_tiling_matches_float64_for_decodes(form: Form) -> None:
    case = batch(form, [700, 3, 511, 0], [1, 1, 1, 1])
    case.check(attend(case, tiling_of(form)))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_chosen_tiling_matches_float64_for_chunks(form: Form) -> None:
    case, tiling = batch(form, [390, 0], [90, 33]), tiling_of(form)
    case.check(prefill(case, tiling.prefill, tiling.prefill_splits))


@pytest.mark.parametrize("form", BY_DESCRIPTORS, ids=str)
def test_chosen_tiling_matches_float64_by_descriptors(form: Form) -> None:
    tiling = tiling_of(form)
    case = by_descriptors(batch(form, [390, 0], [90, 33], block_size=128), tiling.prefill)
    case.check(prefill(case, tiling.prefill, tiling.prefill_splits))


@pytest.mark.parametrize("form", SHARING, ids=str)
def test_chosen_tiling_matches_float64_with_shared_prefix(form: Form) -> None:
    case = batch(form, [530, 540, 600], [1, 1, 1])
    case.check(attend(case, tiling_of(form), [share(case, [0, 1, 2], 512)]))
