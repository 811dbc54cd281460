"""Attention on a GPU at real sizes: against float64, and bitwise the same where it has to be."""

from typing import Any

import numpy as np
import pytest
import torch

from baton_kernels.attention.inputs import HEAD_DIMS
from baton_kernels.attention.paged_decode import paged_decode
from baton_kernels.attention.plan import plan_splits
from baton_kernels.attention.plan_arrays import SplitArrays, SplitCapacity, pack
from baton_kernels.attention.tiling import AttentionTiling, choose_tiling
from baton_kernels.gpu import Gpu
from tests.kernels.gpu.conftest import skip_without_fp8
from tests.support.kernels.attention_cases import (
    Case,
    attend,
    by_descriptors,
    cut_at_random,
    decode,
    every_token,
    make_case,
    poisoned_workspace,
    prefill,
    share,
)
from tests.support.kernels.comparison import FLOATS, each_case, pairwise

pytestmark = pytest.mark.gpu
TYPES = pytest.mark.parametrize(
    ("dtype", "is_fp8"), [(d, False) for d in FLOATS] + [(torch.bfloat16, True)], ids=str
)
RULES = (
    {},
    {"window": 1000},
    {"softcap": 20.0, "has_sinks": True},
    {"window": 77, "has_sinks": True},
)
KINDS = [*({"dtype": dtype} for dtype in FLOATS), {"dtype": torch.bfloat16, "is_fp8": True}]
# Numbers stand for kinds and rules, since every case is a kernel to compile.
CASES = pairwise(kind=range(len(KINDS)), rule=range(len(RULES)), head_dim=HEAD_DIMS)
# Float32 has no descriptors; tiles have at most 128 keys.
TILE_CASES = pairwise(
    kind=[i for i, kind in enumerate(KINDS) if kind["dtype"] != torch.float32],
    rule=range(len(RULES)),
    head_dim=HEAD_DIMS,
    block_size=(128, 256),
    deterministic=(False, True),
)


def shape_of(case: dict[str, int]) -> dict[str, Any]:
    return {**KINDS[case["kind"]], **RULES[case["rule"]], "head_dim": case["head_dim"]}


def large_case(gpu: torch.device, contexts: Any, num_queries: Any, **shape: Any) -> Case:
    skip_without_fp8(gpu, shape.get("is_fp8", False))
    return make_case(contexts, num_queries, device=gpu, **{"group": 4, "num_kv_heads": 8, **shape})


def tiling_of(case: Case, deterministic: bool = False) -> AttentionTiling:
    return choose_tiling(
        case.kv.head_dim,
        case.query.dtype,
        case.kv.keys.dtype,
        case.kv.num_kv_heads,
        Gpu.of(case.query.device),
        deterministic,
    )


@each_case(CASES)
def test_attention_matches_float64_for_chunks_beside_decodes(
    gpu: torch.device, case: dict[str, int]
) -> None:
    contexts = [0, 1, 15, 16, 511, 512, *torch.randint(0, 6000, (58,)).tolist(), 0, 3000, 17, 0]
    num_queries = [1] * 64 + [2048, 513, 300, 77]
    batch = large_case(gpu, contexts, num_queries, **shape_of(case))
    batch.check(attend(batch, tiling_of(batch)))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 16])
@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_matches_float64_for_any_query_group_size(
    gpu: torch.device, block_size: int, group: int
) -> None:
    case = large_case(
        gpu,
        [0, 3000, 100, 5],
        [400, 1, 16, 3],
        dtype=torch.bfloat16,
        head_dim=128,
        group=group,
        num_kv_heads=2,
        block_size=block_size,
    )
    case.check(attend(case, tiling_of(case)))


@each_case(TILE_CASES)
def test_prefill_is_bitwise_same_by_descriptors(gpu: torch.device, case: dict[str, int]) -> None:
    """Slots of a block after its last token are NaN."""
    if not Gpu.of(gpu).has_tma:
        pytest.skip("compute capability below 9.0 has no TMA")
    shape = {**shape_of(case), "block_size": case["block_size"]}
    gathered = large_case(gpu, [0, 2000, 5, 700], [1100, 333, 300, 1], **shape)
    tiling = tiling_of(gathered, bool(case["deterministic"]))
    described = by_descriptors(gathered, tiling.prefill, Gpu.of(gpu))
    out = prefill(described, tiling.prefill, tiling.prefill_splits)
    assert torch.equal(out, prefill(gathered, tiling.prefill, tiling.prefill_splits))
    described.check(out)


@TYPES
def test_attention_matches_float64_for_one_long_context(
    gpu: torch.device, dtype: torch.dtype, is_fp8: bool
) -> None:
    case = large_case(gpu, [131000], [1], dtype=dtype, head_dim=128, is_fp8=is_fp8)
    case.check(attend(case, tiling_of(case)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_decode_attention_is_batch_invariant(gpu: torch.device, deterministic: bool) -> None:
    contexts = torch.randint(0, 6000, (64,)).tolist()
    case = large_case(gpu, contexts, [1] * 64, dtype=torch.bfloat16, head_dim=128)
    tiling = tiling_of(case, deterministic)
    together = attend(case, tiling)
    for i in range(0, 64, 7):
        assert torch.equal(attend(case.of(case.ranges[i : i + 1]), tiling)[i], together[i])


@each_case(CASES)
def test_deterministic_attention_is_same_for_any_chunking(
    gpu: torch.device, case: dict[str, int]
) -> None:
    batch = large_case(gpu, [0, 2000, 5], [1100, 333, 1], **shape_of(case))
    tiling = tiling_of(batch, deterministic=True)
    whole = attend(batch, tiling)
    batch.check(whole)
    single = batch.of(every_token(batch))
    assert torch.equal(attend(single, tiling), whole)
    for _ in range(3):
        assert torch.equal(attend(batch.of(cut_at_random(batch.ranges)), tiling), whole)
    assert torch.equal(prefill(single, tiling.prefill, tiling.splits), whole)
    assert torch.equal(decode(batch, tiling.decode, tiling.splits), whole)


@TYPES
def test_attention_matches_float64_with_shared_prefix(
    gpu: torch.device, dtype: torch.dtype, is_fp8: bool
) -> None:
    contexts = torch.randint(4096, 6000, (100,)).tolist()
    case = large_case(gpu, contexts, [1] * 100, dtype=dtype, head_dim=128, is_fp8=is_fp8)
    prefix = share(case, range(0, 100, 2), 4096)
    case.check(attend(case, tiling_of(case), [prefix]))
    tiling = tiling_of(case, deterministic=True)
    assert torch.equal(attend(case, tiling, [prefix]), attend(case, tiling))


def test_captured_decode_graph_replays_plans_of_any_size(gpu: torch.device) -> None:
    case = large_case(gpu, [3000, 40, 511, 0], [1] * 4, dtype=torch.bfloat16, head_dim=128)
    tiling = tiling_of(case)
    capacity = SplitCapacity(items=64, shared_items=8, members=4)
    packed = torch.zeros(sum(capacity.sizes), dtype=torch.int32, device=gpu)
    arrays, out = SplitArrays.view(packed, capacity), case.poisoned_out()
    workspace = poisoned_workspace(case, 64)
    arguments = (case.query, out, case.kv, case.rule, case.tables, arrays, workspace)
    paged_decode(*arguments, tiling.decode, tiling.shared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(*arguments, tiling.decode, tiling.shared)
    for num_running in (4, 2, 3, 1):
        running = case.of(case.ranges[np.arange(num_running)])
        plan = plan_splits(
            running.ranges,
            tiling.splits,
            tiling.decode.keys,
            tiling.decode.num_tokens(case.group),
        )
        packed.copy_(torch.from_numpy(pack(plan, capacity)))
        graph.replay()
        assert torch.equal(out[:num_running], attend(running, tiling)[:num_running])
        assert not out[num_running:].any()
