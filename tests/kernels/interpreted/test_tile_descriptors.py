"""Prefill whose tiles are loaded by TMA descriptors, against the same gathered by pointers."""

from dataclasses import replace

import pytest
import torch

from baton_kernels.attention.inputs import HEAD_DIMS
from baton_kernels.attention.split_rule import SplitRule
from baton_kernels.attention.tiling import Tiling
from tests.support.kernels.attention_cases import by_descriptors, make_case, prefill
from tests.support.kernels.comparison import each_case, pairwise
from tests.support.kernels.interpreter import IS_INTERPRETED

TILING = Tiling(32, 64, 4, 2)
BF16 = torch.bfloat16
# A whole prompt, chunks that begin and end anywhere in a tile, whole tiles only.
CONTEXTS, NUM_QUERIES = (0, 200, 100, 320, 63), (70, 16, 60, 64, 1)
CASES = pairwise(
    dtype=(BF16, torch.float16),
    head_dim=HEAD_DIMS,
    group=(1, 2, 3, 8),
    block_size=(64, 128, 256),
    window=(None, 21, 150),
    softcap=(None, 4.0),
    has_sinks=(False, True),
    is_fp8=(False, True),
    splits=(None, SplitRule(128, 2)),
)


@each_case(CASES, num_quick=6)
def test_prefill_is_bitwise_same_by_descriptors(case: dict) -> None:
    """Slots of a block after its last token are NaN."""
    shape = {name: case[name] for name in case if name != "splits"}
    gathered = make_case(CONTEXTS, NUM_QUERIES, num_kv_heads=2, **shape)
    described = by_descriptors(gathered, TILING)
    out = prefill(described, TILING, case["splits"])
    assert torch.equal(out, prefill(gathered, TILING, case["splits"]))
    described.check(out)


@pytest.mark.skipif(not IS_INTERPRETED, reason="the interpreter notes what is loaded")
@pytest.mark.parametrize("block_size", [64, 128])
def test_prefill_by_descriptors_loads_whole_tiles(
    monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    loaded, load = [], InterpreterBuilder.create_descriptor_load

    def noted(builder, descriptor, indices, *options):
        loaded.append([int(index.data.item()) for index in indices])
        return load(builder, descriptor, indices, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_load", noted)
    case = make_case([200], [16], BF16, group=2, num_kv_heads=2, block_size=block_size)
    prefill(by_descriptors(case, TILING), TILING)
    table = case.tables[case.ranges.batch_slots[0]].tolist()
    # Of 216 keys, K and V of the three tiles that all queries see whole.
    assert loaded == [
        [table[start // block_size], head, start % block_size, 0]
        for head in range(2)
        for start in (0, 64, 128)
        for _ in "KV"
    ]


def test_prefill_refuses_descriptors_of_another_tiling() -> None:
    case = by_descriptors(make_case([0], [20], BF16, block_size=64), TILING)
    with pytest.raises(ValueError, match="tiles of 64 keys; must be 32, as in the tiling"):
        prefill(case, replace(TILING, keys=32))
