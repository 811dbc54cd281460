"""Packed split plans on the device: one array, so that a step needs one copy from the host.

Offsets are fixed by a capacity, so that a captured CUDA graph can replay over plans of many sizes.
"""

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from baton_kernels.attention.plan import ITEM_FIELDS, Int32Array, SplitPlan

_ALIGNED: Final = 4  # int32 numbers, 16 bytes


@dataclass(frozen=True, slots=True)
class SplitCapacity:
    """Capacity of a packed plan."""

    items: int
    shared_items: int
    members: int

    @classmethod
    def of(cls, plan: SplitPlan) -> "SplitCapacity":
        return cls(len(plan.items), len(plan.shared_items), len(plan.members))

    def fits(self, other: "SplitCapacity") -> bool:
        """Returns whether a plan of this capacity fits one of the `other`."""
        fits_items = self.items <= other.items and self.shared_items <= other.shared_items
        return fits_items and self.members <= other.members

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the arrays, in memory order. Each begins at a multiple of 16 bytes, since Triton
        would compile a kernel again for unaligned pointers."""
        lengths = (
            1,
            1,
            self.members,
            self.members,
            self.members + 1,
            self.items * ITEM_FIELDS,
            self.shared_items * ITEM_FIELDS,
        )
        return tuple(-(-length // _ALIGNED) * _ALIGNED for length in lengths)


@dataclass(frozen=True, slots=True)
class SplitArrays:
    """Split plan on the device, as views of one tensor; see `SplitPlan`."""

    capacity: SplitCapacity
    num_items: torch.Tensor
    num_shared_items: torch.Tensor
    members: torch.Tensor
    positions: torch.Tensor
    first_slots: torch.Tensor
    items: torch.Tensor
    shared_items: torch.Tensor

    @classmethod
    def view(cls, packed: torch.Tensor, capacity: SplitCapacity) -> "SplitArrays":
        """Returns views of `packed`, a result of `pack` on any device, which may be overwritten
        between launches."""
        return cls(capacity, *packed.split(capacity.sizes))

    @classmethod
    def of(cls, plan: SplitPlan, device: torch.device) -> "SplitArrays":
        capacity = SplitCapacity.of(plan)
        packed = torch.from_numpy(pack(plan, capacity))
        return cls.view(packed.to(device, non_blocking=True), capacity)


def pack(plan: SplitPlan, capacity: SplitCapacity) -> Int32Array:
    """Packs the plan into one array of `sum(capacity.sizes)`; see `pack_into`."""
    packed = np.zeros(sum(capacity.sizes), np.int32)
    pack_into(packed, plan, capacity)
    return packed


def pack_into(packed: Int32Array, plan: SplitPlan, capacity: SplitCapacity) -> int:
    """Packs the plan into `packed`, of `sum(capacity.sizes)`. Returns the end of what kernels read:
    the rest is not written, and need not be copied to the device.

    Members beyond the plan's are the tokens of their own index, without partial results: their
    output is zero. So if the capacity exceeds the members, these must be tokens 0 to
    `len(members)`. Raises `ValueError` if the plan exceeds the capacity.
    """
    needed = SplitCapacity.of(plan)
    if not needed.fits(capacity):
        raise ValueError(f"the plan needs {needed}, more than {capacity}: capture a larger one")
    num_members = needed.members
    edges = list(itertools.accumulate(capacity.sizes, initial=0))
    parts = [packed[begin:end] for begin, end in itertools.pairwise(edges)]
    num_items, num_shared_items, members, positions, first_slots, items, shared_items = parts
    num_items[0], num_shared_items[0] = needed.items, needed.shared_items
    items[: plan.items.size] = plan.items.ravel()
    shared_items[: plan.shared_items.size] = plan.shared_items.ravel()
    members[:num_members] = plan.members
    members[num_members : capacity.members] = np.arange(num_members, capacity.members)
    positions[:num_members] = plan.positions
    first_slots[: num_members + 1] = plan.first_slots
    first_slots[num_members + 1 : capacity.members + 1] = plan.num_slots
    if needed.shared_items:
        return edges[-2] + plan.shared_items.size
    return edges[-3] + plan.items.size
