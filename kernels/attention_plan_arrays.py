"""Split plans where kernels read them: one packed array, so that a step is one copy to the device.

The places of a capacity are fixed, for captured graphs to replay over plans of many sizes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention_plan import ITEM_FIELDS, Int32Array, SplitPlan


@dataclass(frozen=True, slots=True)
class SplitCapacity:
    """How much of each a packed plan has room for."""

    items: int
    shared_items: int
    members: int

    @classmethod
    def of(cls, plan: SplitPlan) -> "SplitCapacity":
        return cls(len(plan.items), len(plan.shared_items), len(plan.members))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the two counts and the arrays, in their order in memory."""
        items, shared = self.items * ITEM_FIELDS, self.shared_items * ITEM_FIELDS
        return 1, 1, items, shared, self.members, self.members, self.members + 1


@dataclass(frozen=True, slots=True)
class SplitArrays:
    """A plan's arrays on the device, views of one tensor; see `SplitPlan`."""

    capacity: SplitCapacity
    num_items: torch.Tensor
    num_shared_items: torch.Tensor
    items: torch.Tensor
    shared_items: torch.Tensor
    members: torch.Tensor
    positions: torch.Tensor
    first_slots: torch.Tensor

    @classmethod
    def view(cls, packed: torch.Tensor, capacity: SplitCapacity) -> "SplitArrays":
        """`packed`: what `pack` gives, on any device; it may be written anew between launches."""
        return cls(capacity, *packed.split(capacity.sizes))

    @classmethod
    def of(cls, plan: SplitPlan, device: torch.device) -> "SplitArrays":
        capacity = SplitCapacity.of(plan)
        packed = torch.from_numpy(pack(plan, capacity))
        return cls.view(packed.to(device, non_blocking=True), capacity)


def pack(plan: SplitPlan, capacity: SplitCapacity) -> Int32Array:
    """The plan in one array of `sum(capacity.sizes)`.

    Members beyond the plan's stand for the token of their own number and have no partial results:
    their output is zero. So with more room than members, these must be tokens 0 to `len(members)`.

    Raises `ValueError` if there is too little room.
    """
    needed = SplitCapacity.of(plan)
    if any(need > has for need, has in zip(needed.sizes, capacity.sizes, strict=True)):
        raise ValueError(f"the plan needs {needed}, more than {capacity}: capture a larger one")
    return np.concatenate(list(_padded(plan, capacity)))


def _padded(plan: SplitPlan, capacity: SplitCapacity) -> Iterator[Int32Array]:
    num_members = len(plan.members)
    yield np.array([len(plan.items), len(plan.shared_items)], np.int32)
    for items, room in ((plan.items, capacity.items), (plan.shared_items, capacity.shared_items)):
        yield np.pad(items, ((0, room - len(items)), (0, 0))).ravel()
    yield plan.members
    yield np.arange(num_members, capacity.members, dtype=np.int32)
    yield np.pad(plan.positions, (0, capacity.members - num_members))
    yield np.pad(plan.first_slots, (0, capacity.members - num_members), mode="edge")
