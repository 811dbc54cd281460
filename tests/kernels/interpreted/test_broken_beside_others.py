"""Attention of many sequences of which some have keys that are NaN: of the others no bit changes,
in every form of the kernels. Of V that is not finite, K is NaN and V 0 (`test_cache_write.py`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import Tiling, choose_tiling
from tests.support.kernels.attention_cases import (
    Case,
    attend,
    by_descriptors,
    decode,
    make_case,
    prefill,
    share,
)
from tests.support.kernels.interpreter import IS_INTERPRETED

TILING, LARGE = Tiling(16, 32, 4, 2), Tiling(32, 64, 4, 2)
SHARED = 64  # tokens of a prefix
SPLITS = SplitRule.fixed(SHARED)
BF16 = torch.bfloat16
EACH_BROKEN = 8  # of so many sequences one is


@dataclass(frozen=True, slots=True)
class Form:
    """Attention in one form.

    Attributes:
        attend: computes it.
        most_queries: most queries that a sequence has.
        block_size: tokens of a block.
    """

    attend: Callable[[Case], torch.Tensor]
    most_queries: int = 1
    block_size: int = 16


def cascade(case: Case) -> torch.Tensor:
    """In two prefixes, of which each sequence has one."""
    order = np.arange(len(case.ranges))
    prefixes = [share(case, order[order % 2 == i].tolist(), SHARED) for i in range(2)]
    return decode(case, TILING, SPLITS, LARGE, shared=prefixes)


def deterministic(case: Case) -> torch.Tensor:
    dtype, cached = case.query.dtype, case.kv.keys.dtype
    return attend(
        case, choose_tiling(64, dtype, cached, 1, deterministic=True), max_decode_tokens=4
    )


FORMS = {
    "decode": Form(lambda case: decode(case, TILING, SPLITS)),
    "drafts": Form(lambda case: decode(case, TILING, SPLITS), most_queries=4),
    "chunks": Form(lambda case: prefill(case, LARGE), most_queries=20),
    "chunks in splits": Form(lambda case: prefill(case, LARGE, SPLITS), most_queries=20),
    "chunks by descriptors": Form(
        lambda case: prefill(by_descriptors(case, LARGE), LARGE), most_queries=20, block_size=64
    ),
    "prefixes": Form(cascade),
    "deterministic": Form(deterministic, most_queries=20),
}
NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": BF16},
    "float32": {"dtype": torch.float32},
    "fp8": {"dtype": BF16, "is_fp8": True},
    "window": {"dtype": BF16, "window": 21},
    "sinks": {"dtype": BF16, "has_sinks": True, "softcap": 4.0},
}
# Prefixes are not shared under a window, and descriptors are of numbers of 16 bits.
UNLIKE = {("prefixes", "window"), ("chunks by descriptors", "float32")}
CASES = [
    *((form, "bfloat16", 24) for form in FORMS),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for form in FORMS
        for case in ((form, "bfloat16", 800), *((form, numbers, 24) for numbers in NUMBERS))
        if case[:2] not in UNLIKE and case[1:] != ("bfloat16", 24)
    ),
]


def random_case(form: Form, numbers: str, count: int) -> Case:
    dice = np.random.default_rng(torch.initial_seed() % 2**32)
    contexts = SHARED + dice.integers(0, 60, count)
    num_queries = dice.integers(1, form.most_queries + 1, count)
    settings = {"block_size": form.block_size, "num_kv_heads": 1, **NUMBERS[numbers]}
    return make_case(contexts.tolist(), num_queries.tolist(), **settings)


@pytest.mark.parametrize(("form", "numbers", "count"), CASES)
def test_attention_is_bitwise_same_beside_broken_keys(form: str, numbers: str, count: int) -> None:
    """Breaks the last keys of some sequences, which their last queries alone see."""
    case = random_case(FORMS[form], numbers, count)
    before = FORMS[form].attend(case)
    ranges, broken = case.ranges, np.arange(0, count, EACH_BROKEN)
    case.spoil({i: int(ranges.starts[i] + ranges.num_queries[i]) - 1 for i in broken.tolist()})
    out = FORMS[form].attend(case)
    is_broken = torch.zeros(len(out), dtype=torch.bool)
    is_broken[(ranges.first_tokens + ranges.num_queries - 1)[broken]] = True
    if not (numbers == "fp8" and IS_INTERPRETED):  # which reads the NaN of fp8 as 480
        assert out[is_broken].isnan().any(-1).all()
    assert torch.equal(out[~is_broken], before[~is_broken])


def test_broken_prefix_reaches_its_members_alone() -> None:
    case = random_case(FORMS["prefixes"], "bfloat16", 24)
    before = cascade(case)
    case.spoil({1: SHARED - 1})
    out = cascade(case)
    assert out[1::2].isnan().any(-1).all()
    assert torch.equal(out[::2], before[::2])
