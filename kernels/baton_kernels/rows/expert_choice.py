"""Expert routing (MoE gating): the k largest of a router's logits, and their weights.

Ties are ordered by expert index, so that the choice depends on the logits alone: a library's top-k
does not define the order of ties, which are common in bf16.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed
from baton_kernels.variant import Variant

FP_FUSION: Final = True
MAX_EXPERTS: Final = 4096
_NUM_WARPS: Final = 1


@triton.jit
def _choose_kernel(
    logits, chosen, weights, logits_stride, num_experts,
    CHOICES: tl.constexpr, IS_SHARE_OF_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_CHOICES: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of one token: reads its logits once, then takes the largest in turn."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    places = tl.arange(0, BLOCK_CHOICES)
    is_free = experts < num_experts
    values = tl.load(logits + token * logits_stride + experts, is_free, -float("inf"))
    values = values.to(tl.float32)
    largest = tl.max(values, axis=0)
    total = tl.full((), 0.0, tl.float32)
    if not IS_SHARE_OF_CHOSEN:
        total += tl.sum(tl.where(is_free, tl.exp(values - largest), 0.0), axis=0)
    picks = tl.zeros((BLOCK_CHOICES,), tl.int32)
    parts = tl.zeros((BLOCK_CHOICES,), tl.float32)
    for choice in tl.static_range(CHOICES):
        best = tl.max(tl.where(is_free, values, -float("inf")), axis=0)
        pick = tl.min(tl.where(is_free & (values == best), experts, BLOCK), axis=0)
        # NaN logits still choose a valid expert.
        pick = tl.minimum(pick, num_experts - 1)
        part = tl.exp(best - largest)
        is_free &= experts != pick
        picks = tl.where(places == choice, pick, picks)
        parts = tl.where(places == choice, part, parts)
        if IS_SHARE_OF_CHOSEN:
            total += part
    is_place = places < CHOICES
    tl.store(chosen + token * CHOICES + places, picks, is_place)
    tl.store(weights + token * CHOICES + places, parts / total, is_place)


def choose_experts(
    logits: torch.Tensor, choices: int, *, is_share_of_chosen: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the experts of each token, most likely first, int32, and their weights, float32:
    `[num_tokens, choices]` each.

    Args:
        logits: `[num_tokens, num_experts]` of any float type; rows may be strided.
        is_share_of_chosen: whether to normalize a token's weights to a sum of 1; else they are
            probabilities of a softmax over all experts.
    """
    num_tokens, num_experts = logits.shape
    check_dtype("logits", logits, *FLOATS)
    check_packed("logits", logits)
    if not 0 < choices <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"{choices} of {num_experts} experts are to be chosen; must be at least 1 and at most "
            f"all, of which there may be {MAX_EXPERTS}"
        )
    chosen = torch.empty(num_tokens, choices, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, choices, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _choose_kernel[(num_tokens,)](
            logits, chosen, weights, logits.stride(0), num_experts,
            **_constants(num_experts, choices, is_share_of_chosen),
            num_warps=_NUM_WARPS, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return chosen, weights


def reference_choose_experts(
    logits: torch.Tensor, choices: int, *, is_share_of_chosen: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `choose_experts` in torch, in the dtype of `logits`."""
    chosen = logits.sort(stable=True, dim=-1, descending=True).indices[:, :choices]
    if is_share_of_chosen:
        return chosen.int(), logits.gather(-1, chosen).softmax(-1)
    return chosen.int(), logits.softmax(-1).gather(-1, chosen)


def _constants(num_experts: int, choices: int, is_share_of_chosen: bool) -> dict[str, Any]:
    return {
        "CHOICES": choices,
        "IS_SHARE_OF_CHOSEN": is_share_of_chosen,
        "BLOCK": triton.next_power_of_2(num_experts),
        "BLOCK_CHOICES": triton.next_power_of_2(choices),
    }


def _variant(
    dtype: torch.dtype, num_experts: int, choices: int, is_share_of_chosen: bool
) -> Variant:
    name, constants = TRITON_TYPES[dtype], _constants(num_experts, choices, is_share_of_chosen)
    kind = "" if is_share_of_chosen else " by chance"
    return Variant(
        name=f"choose_experts {name} {choices} of {num_experts}{kind}",
        kernel=_choose_kernel,
        signature={"logits": f"*{name}", "chosen": "*i32", "weights": "*fp32"}
        | {"logits_stride": "i32", "num_experts": "i32"},
        constants=constants,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


VARIANTS: Final = (
    *(_variant(dtype, 128, 8, True) for dtype in FLOATS),
    _variant(torch.bfloat16, 8, 2, True),
    _variant(torch.bfloat16, 128, 4, True),
    _variant(torch.bfloat16, 512, 10, False),
)
