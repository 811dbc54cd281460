"""Summary of logits for sampling, per tile of a row and in one pass; and log-probabilities from
it."""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

from baton_kernels.launch import FLOATS, TRITON_TYPES, check_dtype, check_packed, check_shape
from baton_kernels.sampling.truncation import NO_TOKEN, SMALLEST
from baton_kernels.variant import Variant

FP_FUSION: Final = False
_NUM_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiling of a row; the same for all rows and batches.

    Attributes:
        tile: number of logits that one program reads.
        strip: number of logits per stored maximum; divides `tile`. Both are powers of 2.
    """

    tile: int = 4096
    strip: int = 128

    def num_tiles(self, vocab_size: int) -> int:
        return -(-vocab_size // self.tile)

    def num_strips(self, vocab_size: int) -> int:
        return self.num_tiles(vocab_size) * (self.tile // self.strip)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Summary of each row, in float32 except `tokens`.

    Attributes:
        strip_maxima: `[num_rows, num_strips]`.
        maxima: `[num_rows, num_tiles]`, as are the following tensors.
        tokens: int32, the first token with the tile's largest logit.
        sums: sum of exp(logit - the tile's largest).
        masses: sum of exp((logit - the tile's largest) / temperature); as `sums` if that is 0.
    """

    strip_maxima: torch.Tensor
    maxima: torch.Tensor
    tokens: torch.Tensor
    sums: torch.Tensor
    masses: torch.Tensor


@triton.jit
def _summarise_kernel(
    logits, stride, temperatures, strip_maxima, tile_maxima, tile_tokens, tile_sums, tile_masses,
    vocab_size, NUM_TILES: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Summarises one tile of a row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    strips = tile * (TILE // STRIP) + tl.arange(0, TILE // STRIP)
    tokens = strips[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    inside = tokens < vocab_size
    values = tl.load(logits + row * stride + tokens, inside, -float("inf")).to(tl.float32)
    maxima = tl.max(values, axis=1)
    tl.store(strip_maxima + row * (NUM_TILES * (TILE // STRIP)) + strips, maxima)
    largest = tl.max(maxima, axis=0)
    first = tl.min(tl.min(tl.where(values == largest, tokens, NO_TOKEN), axis=1), axis=0)
    # In a tile where no token has a chance, the sums become 0, not NaN.
    values -= tl.where(largest == -float("inf"), 0.0, largest)
    temperature = tl.load(temperatures + row)
    inverse = 1.0 / tl.where(temperature == 0.0, 1.0, tl.maximum(temperature, SMALLEST))
    place = row * NUM_TILES + tile
    tl.store(tile_maxima + place, largest)
    tl.store(tile_tokens + place, first)
    tl.store(tile_sums + place, tl.sum(tl.sum(tl.exp(values), axis=1), axis=0))
    tl.store(tile_masses + place, tl.sum(tl.sum(tl.exp(values * inverse), axis=1), axis=0))


@triton.jit
def _logprob_kernel(
    logits, stride, token_ids, tile_maxima, tile_sums, out,
    NUM_TILES: tl.constexpr, BLOCK_TILES: tl.constexpr,
):  # fmt: skip
    """Computes the log-probability of one row, from its summary and one logit."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    is_tile = tiles < NUM_TILES
    maxima = tl.load(tile_maxima + row * NUM_TILES + tiles, is_tile, -float("inf"))
    sums = tl.load(tile_sums + row * NUM_TILES + tiles, is_tile, 0.0)
    largest = tl.max(maxima, axis=0)
    total = tl.sum(tl.where(sums > 0.0, sums * tl.exp(maxima - largest), 0.0), axis=0)
    logit = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(out + row, logit - largest - tl.log(total))


def summarise(logits: torch.Tensor, temperatures: torch.Tensor, tiling: Tiling) -> RowSummary:
    """Summarises logits `[num_rows, vocab_size]`, reading them once. `temperatures`: float32
    `[num_rows]`."""
    num_rows, vocab_size = logits.shape
    check_dtype("logits", logits, *FLOATS)
    check_packed("logits", logits)
    check_shape("temperature", temperatures, (num_rows,))
    check_dtype("temperature", temperatures, torch.float32)
    check_packed("temperature", temperatures)
    num_tiles = tiling.num_tiles(vocab_size)
    strips = logits.new_empty((num_rows, tiling.num_strips(vocab_size)), dtype=torch.float32)
    types = (torch.float32, torch.int32, torch.float32, torch.float32)
    tiles = [logits.new_empty((num_rows, num_tiles), dtype=dtype) for dtype in types]
    if num_rows:
        _summarise_kernel[(num_rows, num_tiles)](
            logits, logits.stride(0), temperatures, strips, *tiles, vocab_size,
            **_constants(tiling, vocab_size), num_warps=_NUM_WARPS, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return RowSummary(strips, *tiles)


def logprobs_of(
    logits: torch.Tensor, token_ids: torch.Tensor, summary: RowSummary, out: torch.Tensor
) -> torch.Tensor:
    """Fills `out`, float32 `[num_rows]`, with the log-probabilities in nats of `token_ids`, int64
    `[num_rows]`, from summarised logits."""
    num_rows, num_tiles = summary.maxima.shape
    check_shape("token_ids", token_ids, (num_rows,))
    check_dtype("token_ids", token_ids, torch.int64)
    check_packed("token_ids", token_ids)
    check_shape("logprobs", out, (num_rows,))
    check_dtype("logprobs", out, torch.float32)
    check_packed("logprobs", out)
    if num_rows:
        _logprob_kernel[(num_rows,)](
            logits, logits.stride(0), token_ids, summary.maxima, summary.sums, out,
            NUM_TILES=num_tiles, BLOCK_TILES=triton.next_power_of_2(num_tiles),
            num_warps=1, enable_fp_fusion=FP_FUSION,
        )  # fmt: skip
    return out


def reference_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Computes `logprobs_of` in torch, in the dtype of `logits`."""
    return logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]


def _constants(tiling: Tiling, vocab_size: int) -> dict[str, Any]:
    num_tiles = tiling.num_tiles(vocab_size)
    return {"NUM_TILES": num_tiles, "TILE": tiling.tile, "STRIP": tiling.strip}


VOCAB_SIZE: Final = 128256  # of the compiled variants


def _variant(dtype: torch.dtype) -> Variant:
    constants = _constants(Tiling(), VOCAB_SIZE)
    return Variant(
        name=f"sample, summarise {TRITON_TYPES[dtype]}",
        kernel=_summarise_kernel,
        signature={"logits": f"*{TRITON_TYPES[dtype]}", "stride": "i32", "temperatures": "*fp32"}
        | {"strip_maxima": "*fp32", "vocab_size": "i32:16"}
        | dict.fromkeys(("tile_maxima", "tile_sums", "tile_masses"), "*fp32")
        | {"tile_tokens": "*i32"},
        constants=constants,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def _logprob_variant(dtype: torch.dtype) -> Variant:
    return Variant(
        name=f"sample, logprob {TRITON_TYPES[dtype]}",
        kernel=_logprob_kernel,
        signature={"logits": f"*{TRITON_TYPES[dtype]}", "stride": "i32", "token_ids": "*i64"}
        | {"tile_maxima": "*fp32", "tile_sums": "*fp32", "out": "*fp32"},
        constants={"NUM_TILES": 32, "BLOCK_TILES": 32},
        num_warps=1,
        num_stages=1,
    )


VARIANTS: Final = (*map(_variant, FLOATS), *map(_logprob_variant, FLOATS))
