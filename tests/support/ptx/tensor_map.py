"""Tensor map: the box of a tensor that TMA copies, in the machine's own encoding of 128 bytes.

The GPU's encoding is secret; `machine/tensor_map.h` has the same fields in the same order.
"""

import struct
from dataclasses import dataclass
from typing import Any, Final, Self

SIZE: Final = 128
_MAGIC: Final = 0x7A7A1234
_FORMAT: Final = "<IIQII5Q4Q5I"
_SWIZZLE_BYTES: Final = {1: 32, 2: 64, 3: 128}
_MOST_ELEMENTS = 256
_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Tensor map; the last dimension of a tensor is the first of the map.

    Attributes:
        address: of the first element.
        element_bytes: size of an element.
        swizzle: pattern of 16-byte pieces in shared memory: 0 none, 1 to 3 over 32, 64, 128 bytes.
        sizes, box: elements of the tensor and of a copy, in each dimension.
        strides: in bytes, of each dimension but the first.
    """

    address: int
    element_bytes: int
    swizzle: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @classmethod
    def of(cls, descriptor: Any, description: dict[str, Any]) -> Self:
        """Returns the map that a driver encodes at a launch. Refuses what the GPU's would.

        Args:
            descriptor: a `TensorDescriptor`.
            description: Triton's, of the compiled kernel: swizzle, size of elements, box.
        """
        size = description["elem_size"]
        strides = tuple(stride * size for stride in descriptor.strides[-2::-1])
        made = cls(
            descriptor.base.data_ptr(),
            size,
            description["swizzle"],
            tuple(descriptor.shape[::-1]),
            strides,
            tuple(description["block_size"][::-1]),
        )
        made._check()
        return made

    def _check(self) -> None:
        row = self.box[0] * self.element_bytes
        unaligned = [x for x in (self.address, *self.strides, row) if x % _ALIGNMENT]
        if unaligned:
            raise ValueError(f"a tensor map has {unaligned}; expected multiples of {_ALIGNMENT}")
        if max(self.box) > _MOST_ELEMENTS:
            raise ValueError(f"a tensor map's box is {self.box}; expected at most {_MOST_ELEMENTS}")
        if self.swizzle and row > _SWIZZLE_BYTES[self.swizzle]:
            raise ValueError(
                f"a tensor map's rows have {row} bytes; expected at most "
                f"{_SWIZZLE_BYTES[self.swizzle]} by its swizzle"
            )

    def __bytes__(self) -> bytes:
        missing = 5 - len(self.sizes)
        fields = struct.pack(
            _FORMAT, _MAGIC, len(self.sizes), self.address, self.element_bytes, self.swizzle,
            *self.sizes, *[1] * missing, *self.strides, *[0] * missing, *self.box, *[1] * missing,
        )  # fmt: skip
        return fields.ljust(SIZE, b"\0")
