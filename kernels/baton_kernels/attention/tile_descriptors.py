"""TMA descriptors of K and V, by which prefill loads a tile of a block with one instruction.

A gather by pointers needs an address for every 16 bytes. Descriptors are made once for the cache
of a layer: they name its memory, not its content, and are valid as long as it.
"""

from dataclasses import dataclass
from typing import Final

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from baton_kernels.attention.tiling import Tiling, tile_dim
from baton_kernels.gpu import Gpu

# In bytes, of addresses and strides.
_ALIGNMENT: Final = 16
# float32 is for checking models, and its tiles would spill registers.
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class TileDescriptors:
    """Descriptors of K and V of one layer, `[num_blocks, num_kv_heads, block_size, head_dim]` each.

    A load returns a box of `[1, 1, tile_keys, tile_dim]`, whose columns beyond `head_dim` are zero.
    """

    keys: TensorDescriptor
    values: TensorDescriptor

    @property
    def tile_keys(self) -> int:
        return int(self.keys.block_shape[2])


def describe_tiles(
    keys: torch.Tensor, values: torch.Tensor, tiling: Tiling, gpu: Gpu
) -> TileDescriptors | None:
    """Returns the descriptors of a layer's tiles, or None where pointers gather them: on GPUs
    without TMA, for blocks that do not hold whole tiles, and where the layout or the dtype does not
    allow descriptors.

    Args:
        keys, values: as those of `PagedKv`.
    """
    is_possible = (
        gpu.has_tma
        and keys.dtype in DTYPES
        and keys.shape[2] % tiling.keys == 0
        and _is_aligned(keys)
        and _is_aligned(values)
    )
    if not is_possible:
        return None
    box = [1, 1, tiling.keys, tile_dim(keys.shape[3])]
    return TileDescriptors(*(TensorDescriptor.from_tensor(each, box) for each in (keys, values)))


def _is_aligned(tensor: torch.Tensor) -> bool:
    sizes = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    return not any(size % _ALIGNMENT for size in (tensor.data_ptr(), *sizes))
