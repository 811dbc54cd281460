"""Weights in codes of 8 or 4 bits, with a scale for each output and group of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

CODEBOOK_SIZE: Final = 16
"""Numbers that a code of 4 bits stands for."""

INTEGERS: Final = torch.arange(-8.0, 8.0)
"""Codebook of signed integers of 4 bits."""

_CHUNK: Final = 2**20  # numbers that are quantized at a time, so that they stay in the cache


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weight of a linear layer, `[out_features, in_features]`. Each number is code * scale +
    minimum, with the number that the codebook has for its code, if there is one.

    Attributes:
        codes: `[out_features, in_features]`, int8 or float8_e4m3fn; or, with a codebook,
            `[out_features, in_features / 2]`, uint8, as `halves_of` makes them.
        scales: float32 `[out_features, num_groups]`, of groups of consecutive inputs, which have
            equal sizes.
        minima: as `scales`; None: they are 0.
        codebook: float32 `[16]`; None: a code is a number itself.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None = None
    codebook: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.shape
        fits = self.scales.dim() == 2 and len(self.scales) == num_outputs
        if not fits or not self.scales.shape[1] or num_inputs % self.scales.shape[1]:
            raise ValueError(f"scales {list(self.scales.shape)} of {num_outputs} x {num_inputs}")
        if self.minima is not None and self.minima.shape != self.scales.shape:
            raise ValueError(f"minima {list(self.minima.shape)}, scales {list(self.scales.shape)}")
        if self.codebook is not None and self.codebook.shape != (CODEBOOK_SIZE,):
            raise ValueError(f"{list(self.codebook.shape)} numbers of a codebook for 4 bits")

    @property
    def shape(self) -> torch.Size:
        """Numbers of outputs and inputs."""
        per_code = 1 if self.codebook is None else 2
        return torch.Size((len(self.codes), per_code * self.codes.shape[1]))

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """Its size, without the codebook."""
        of_minima = 0 if self.minima is None else self.minima.nbytes
        return self.codes.nbytes + self.scales.nbytes + of_minima

    def __getitem__(self, rows: Any) -> "QuantizedWeight":
        """Returns the weight of some outputs."""
        minima = None if self.minima is None else self.minima[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minima=minima)

    def numbers(self) -> torch.Tensor:
        """Returns the plain weight, float32 `[out_features, in_features]`."""
        if self.codebook is None:
            wide = self.codes.float()
        else:
            wide = self.codebook[codes_of(self.codes).int()]
        groups = wide.unflatten(1, (-1, self.group_size))
        groups.mul_(self.scales[..., None])
        if self.minima is not None:
            groups.add_(self.minima[..., None])
        return wide


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Returns the weight with the outputs of all, one after the other; None if their codes or
    groups differ."""
    first = weights[0]
    if any(not _are_alike(first, other) for other in weights[1:]):
        return None
    minima = [w.minima for w in weights if w.minima is not None]
    return replace(
        first,
        codes=torch.cat([w.codes for w in weights]),
        scales=torch.cat([w.scales for w in weights]),
        minima=torch.cat(minima) if minima else None,
    )


def _are_alike(weight: QuantizedWeight, other: QuantizedWeight) -> bool:
    if weight.codebook is None or other.codebook is None:
        has_same_codebook = weight.codebook is other.codebook
    else:
        has_same_codebook = torch.equal(weight.codebook, other.codebook)
    has_same_codes = weight.codes.dtype == other.codes.dtype and has_same_codebook
    has_same_minima = (weight.minima is None) == (other.minima is None)
    return has_same_codes and has_same_minima and weight.group_size == other.group_size


def halves_of(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes below 16, uint8 `[outputs, inputs]`, two in a byte: `[outputs, inputs / 2]`. Of
    each eight, those of even number come first, as linear.c reads them."""
    ordered = codes.unflatten(1, (-1, 4, 2)).transpose(2, 3).flatten(1)
    halves: torch.Tensor = ordered[:, ::2] | ordered[:, 1::2] << 4
    return halves


def codes_of(halves: torch.Tensor) -> torch.Tensor:
    """Returns the codes that `halves_of` was given."""
    ordered = torch.stack([halves & 15, halves >> 4], dim=-1).flatten(1)
    codes: torch.Tensor = ordered.unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)
    return codes


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Returns a weight in integers of 8 or 4 bits, of which the number of largest magnitude in a
    group is one: -127 or 127, or -8.

    Args:
        weight: `[out_features, in_features]`.
        group_size: inputs of a group, which divides `in_features`.
    """
    quantize = _integers_of_8 if bits == 8 else _integers_of_4
    size = max(1, _CHUNK // weight.shape[1])
    parts = [quantize(rows.float().unflatten(1, (-1, group_size))) for rows in weight.split(size)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return QuantizedWeight(codes, scales, codebook=None if bits == 8 else INTEGERS)


def _integers_of_8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of groups, `[outputs, num_groups, group_size]`."""
    scales = groups.abs().amax(-1).div_(127)
    return _rounded(groups, scales).to(torch.int8).flatten(1), scales


def _integers_of_4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lowest, highest = groups.aminmax(dim=-1)
    scales = torch.where(highest > -lowest, highest, lowest).div_(-8)
    codes = _rounded(groups, scales).add_(8).clamp_(0, CODEBOOK_SIZE - 1)
    return halves_of(codes.to(torch.uint8).flatten(1)), scales


def _rounded(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scales == 0, 0, 1 / scales)
    return groups.mul(inverse[..., None]).round_()
