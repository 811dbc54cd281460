"""Logit biases and banned tokens: rules about single tokens.

Both are lists over all rows, of which a program takes a part, so that a step with many rules and
rows is one launch for each. A ban may depend on the end of its row's history, which is read in
place.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import check_dtype, check_packed, check_shape
from baton_kernels.sampling.penalties import History
from baton_kernels.variant import Variant

FP_FUSION: Final = False
MAX_PREFIX: Final = 32
_BLOCK: Final = 64
_NUM_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class Biases:
    """Biases to add, `[num_biases]` each; no cell occurs twice.

    Attributes:
        rows, token_ids: int64, row and column of the scores.
        values: float32.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bans:
    """Tokens that must not be chosen, `[num_bans]` each.

    Attributes:
        rows, token_ids: int64, row and column of the scores.
        prefix_lengths: int64, number of prefix tokens; the ban applies if the history ends with
            them, or always for 0.
        prefixes: int32 `[num_bans, width]`, these tokens, the last first; width is at most
            `MAX_PREFIX`, and 0 if no ban has a prefix.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    prefix_lengths: torch.Tensor
    prefixes: torch.Tensor


@triton.jit(do_not_specialize=["num_biases"])
def _bias_kernel(scores, scores_stride, rows, tokens, values, num_biases, BLOCK: tl.constexpr):
    """Adds `BLOCK` biases."""
    biases = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_bias = biases < num_biases
    row = tl.load(rows + biases, is_bias, 0)
    cells = scores + row * scores_stride + tl.load(tokens + biases, is_bias, 0)
    score = tl.load(cells, is_bias, 0.0) + tl.load(values + biases, is_bias, 0.0)
    tl.store(cells, score, is_bias)


@triton.jit(do_not_specialize=["num_bans", "width", "capacity"])
def _ban_kernel(
    scores, scores_stride, rows, tokens, prefix_lengths, prefixes, num_bans, width,
    token_ids, batch_slots, lengths, capacity, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Applies `BLOCK` bans. A history shorter than the prefix does not match it."""
    bans = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_ban = bans < num_bans
    row = tl.load(rows + bans, is_ban, 0)
    if WIDTH > 0:
        distances = tl.arange(0, WIDTH)[None, :]
        prefix_length = tl.load(prefix_lengths + bans, is_ban, 0)[:, None]
        is_part = is_ban[:, None] & (distances < prefix_length)
        prefix = tl.load(prefixes + bans[:, None] * width + distances, is_part, 0)
        place = tl.load(lengths + row, is_ban, 0)[:, None] - 1 - distances
        is_there = is_part & (place >= 0)
        batch_slot = tl.load(batch_slots + row, is_ban, 0)[:, None].to(tl.int64)
        found = tl.load(token_ids + batch_slot * capacity + place, is_there, -1)
        is_other = is_part & ((found != prefix) | (place < 0))
        is_ban &= tl.max(is_other.to(tl.int32), axis=1) == 0
    cells = scores + row * scores_stride + tl.load(tokens + bans, is_ban, 0)
    tl.store(cells, tl.full((BLOCK,), -float("inf"), tl.float32), is_ban)


def add_biases(scores: torch.Tensor, biases: Biases) -> None:
    """Adds biases to scores in place.

    Args: scores: float32 `[num_rows, vocab_size]`; rows may be strided.
    """
    num_biases = len(biases.rows)
    _check_scores(scores)
    _check_cells(biases.rows, biases.token_ids)
    check_shape("values", biases.values, (num_biases,))
    check_dtype("values", biases.values, torch.float32)
    check_packed("values", biases.values)
    if num_biases:
        _bias_kernel[(triton.cdiv(num_biases, _BLOCK),)](
            scores, scores.stride(0), biases.rows, biases.token_ids, biases.values, num_biases,
            BLOCK=_BLOCK, num_warps=_NUM_WARPS, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip


def ban(scores: torch.Tensor, bans: Bans, history: History | None = None) -> None:
    """Sets the scores of banned tokens to -inf, in place.

    Args:
        scores: float32 `[num_rows, vocab_size]`; rows may be strided.
        history: token history of these rows; required if a ban has a prefix.
    """
    num_bans, width = bans.prefixes.shape
    _check_scores(scores)
    _check_bans(bans, history, len(scores))
    if not num_bans:
        return
    # Without prefixes the kernel does not read the history: any tensors will do, but always of the
    # same types, for which it is compiled.
    given = (bans.prefixes, bans.rows, bans.rows)
    if width:
        assert history is not None, "a prefix without a history"
        given = (history.token_ids, history.batch_slots, history.lengths)
    _ban_kernel[(triton.cdiv(num_bans, _BLOCK),)](
        scores, scores.stride(0), bans.rows, bans.token_ids, bans.prefix_lengths, bans.prefixes,
        num_bans, width, *given, given[0].shape[1], BLOCK=_BLOCK, WIDTH=MAX_PREFIX * (width > 0),
        num_warps=_NUM_WARPS, enable_fp_fusion=FP_FUSION,
    )  # fmt: skip


def reference_add_biases(scores: torch.Tensor, biases: Biases) -> None:
    """Computes `add_biases` in torch."""
    scores[biases.rows, biases.token_ids] += biases.values


def reference_ban(scores: torch.Tensor, bans: Bans, history: History | None = None) -> None:
    """Computes `ban` in torch, ban by ban."""
    columns = (bans.rows, bans.token_ids, bans.prefix_lengths)
    for i, (row, token_id, num) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        prefix = bans.prefixes[i, :num].tolist()
        ending: list[int] = []
        if num:
            assert history is not None, "a prefix without a history"
            tokens = history.token_ids[history.batch_slots[row], : history.lengths[row]]
            ending = tokens[-num:].flip(0).tolist()
        if ending == prefix:
            scores[row, token_id] = -torch.inf


def _check_scores(scores: torch.Tensor) -> None:
    check_dtype("scores", scores, torch.float32)
    check_packed("scores", scores)


def _check_cells(rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    for name, tensor in (("rows", rows), ("token_ids", token_ids)):
        check_shape(name, tensor, (len(rows),))
        check_dtype(name, tensor, torch.int64)
        check_packed(name, tensor)


def _check_bans(bans: Bans, history: History | None, num_rows: int) -> None:
    num_bans, width = bans.prefixes.shape
    _check_cells(bans.rows, bans.token_ids)
    check_shape("prefixes", bans.prefixes, (len(bans.rows), width))
    check_dtype("prefixes", bans.prefixes, torch.int32)
    if width:
        check_packed("prefixes", bans.prefixes, 2)
    check_shape("prefix_lengths", bans.prefix_lengths, (num_bans,))
    check_dtype("prefix_lengths", bans.prefix_lengths, torch.int64)
    check_packed("prefix_lengths", bans.prefix_lengths)
    if width > MAX_PREFIX:
        raise ValueError(f"prefixes have {width} tokens; may have at most {MAX_PREFIX}")
    if width and history is None:
        raise ValueError("prefixes are given without the history that they are compared with")
    if history is not None:
        check_dtype("history.token_ids", history.token_ids, torch.int32)
        check_packed("history.token_ids", history.token_ids, 2)
        for name in ("batch_slots", "lengths"):
            check_shape(f"history.{name}", getattr(history, name), (num_rows,))
            check_dtype(f"history.{name}", getattr(history, name), torch.int64)
            check_packed(f"history.{name}", getattr(history, name))


def _ban_variant(width: int) -> Variant:
    constants: dict[str, Any] = {"BLOCK": _BLOCK, "WIDTH": width}
    return Variant(
        name=f"ban{' by what is before' if width else ''}",
        kernel=_ban_kernel,
        signature={"scores": "*fp32", "scores_stride": "i32", "num_bans": "i32", "width": "i32"}
        | dict.fromkeys(("rows", "tokens", "prefix_lengths", "batch_slots", "lengths"), "*i64")
        | {"prefixes": "*i32", "token_ids": "*i32", "capacity": "i32:16"},
        constants=constants,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


VARIANTS: Final = (
    Variant(
        name="add_biases",
        kernel=_bias_kernel,
        signature={"scores": "*fp32", "scores_stride": "i32", "rows": "*i64", "tokens": "*i64"}
        | {"values": "*fp32", "num_biases": "i32"},
        constants={"BLOCK": _BLOCK},
        num_warps=_NUM_WARPS,
        num_stages=1,
    ),
    _ban_variant(0),
    _ban_variant(MAX_PREFIX),
)
