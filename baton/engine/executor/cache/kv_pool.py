"""Paged KV pools: the memory of blocks, and views of it. Knows no sequences and no block tables.

A pool is block-major, `[num_blocks, block_bytes]`: a block is one contiguous region over all layers
of its group, so that a handoff is a list of (offset, length) and needs no packing. Typed, strided
views are derived from its layout (`kv_layout`).
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from baton.engine.executor.cache.block_copy import Places, Rows, as_rows, copy_rows, runs
from baton.engine.executor.cache.cuda_ipc import MappedMemory
from baton.engine.executor.cache.kv_layout import KvLayout, LayerLayout, LayerPlace
from baton.engine.executor.cache.kv_scales import KvScales
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton.engine.executor.device_stream import uploader


class LayerCache:
    """Views of one layer's K and V over the whole pool.

    Attributes:
        keys: `[num_blocks, num_kv_heads, block_size, key_head_dim]`; blocks and heads are strided.
        values: `[num_blocks, num_kv_heads, block_size, value_head_dim]`, likewise, with the same
            strides of blocks and heads.
    """

    def __init__(self, typed: torch.Tensor, layout: KvLayout, layer: LayerLayout) -> None:
        def view(offset: int, head_dim: int) -> torch.Tensor:
            shape = (len(typed), layer.num_kv_heads, layout.block_size, head_dim)
            strides = (typed.stride(0), layer.head_stride // itemsize, head_dim, 1)
            return typed.as_strided(shape, strides, typed.storage_offset() + offset // itemsize)

        itemsize = typed.element_size()
        self.keys = view(layer.key_offset, layer.key_head_dim)
        self.values = view(layer.value_offset, layer.value_head_dim)


class KvPool:
    """KV pool of one cache group: blocks 1 to `num_blocks` of memory on one device.

    Block 0, `NULL_BLOCK`, is always zero: it pads tables to one length.

    Attributes:
        dtype: dtype of its K and V.
        device: device of its memory, a GPU with its index.
        shared: the memory that contains it, if other processes may map it for reading.
        mapped: the memory that contains it, if it is another process's, of a GPU.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        shared: SharedMemory | None = None,
        *,
        mapped: MappedMemory | None = None,
        for_gpu: bool = False,
    ) -> None:
        """Uses `shared` or `mapped`, memory of `pool_bytes`. Both None: allocates memory, pinned
        for a GPU if `for_gpu`."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.shared = shared
        self.mapped = mapped
        shape = (num_blocks + 1, layout.block_bytes)
        memory = shared or mapped
        if memory is None:
            self._bytes = _zeros(shape, device, pinned=for_gpu)
        else:
            self._bytes = memory.content.view(shape)
        self.device = self._bytes.device  # a GPU with its index
        typed = self._bytes.view(self.dtype)
        self.layers = [LayerCache(typed, layout, layer) for layer in layout.layers]

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Zeroes blocks that will be filled in part and read as a whole."""
        self._bytes[block_ids] = 0

    def copy_blocks(self, sources: list[int], targets: list[int], origin: "KvPool") -> None:
        """Copies whole blocks from a pool of the same layout, this one or the host's; all are read
        before any is written."""
        self.copy_content(sources, targets, origin.content)

    def copy_content(
        self, sources: Sequence[int], targets: Sequence[int], origin: torch.Tensor
    ) -> None:
        """Copies blocks from memory `[num_blocks, block_bytes]` outside this process's pools."""
        sources, targets = list(sources), list(targets)
        if self._bytes.is_cuda or origin.is_cuda:
            is_copied = _copy_on_gpu(origin, self._bytes, sources, targets)
            if is_copied:
                return
        self._bytes[targets] = origin[sources].to(self._bytes.device)

    def read_blocks(self, block_ids: Sequence[int]) -> "list[memoryview[Any]]":
        """Returns the bytes of blocks in their order, one piece per run of consecutive blocks.

        On a CPU views of the pool, valid until the blocks are released; else one copy of them all,
        made on the thread's current stream.
        """
        if self.device.type != "cpu":
            chosen = torch.tensor(block_ids, device=self.device)
            gathered = self._bytes.index_select(0, chosen).view(-1)
            staged: Any = _staging(gathered.numel()).copy_(gathered).numpy()
            return [memoryview(staged)]
        whole: Any = self._bytes.view(-1).numpy()  # some numpy releases type it as no buffer
        size, content = self.layout.block_bytes, memoryview(whole)
        return [
            content[block_ids[start] * size : (block_ids[stop - 1] + 1) * size]
            for start, stop in runs(np.asarray(block_ids, np.int64))
        ]

    def write_blocks(
        self, block_ids: Sequence[int], pieces: "Sequence[bytes | memoryview[Any]]"
    ) -> None:
        """Writes the bytes of `block_ids` in order, in pieces of whole blocks; no id repeats. On a
        GPU they are written on the thread's current stream, and are there on return."""
        size = self.layout.block_bytes
        num_bytes = sum(map(len, pieces))
        assert num_bytes == len(block_ids) * size, "content of another length"
        if self.device.type == "cpu":
            for piece in pieces:
                rows = as_rows(np.frombuffer(piece, np.uint8), size)
                self.copy_rows(rows, range(len(rows)), block_ids[: len(rows)])
                block_ids = block_ids[len(rows) :]
            return
        staged = _staging(num_bytes)
        start = 0
        for piece in pieces:
            staged.numpy()[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
            start += len(piece)
        self._bytes[list(block_ids)] = staged.view(-1, size).to(self.device, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()

    def copy_rows(
        self, origin: Rows, sources: "Sequence[int] | Places", targets: Sequence[int]
    ) -> None:
        """Copies rows of another pool's memory to blocks of this CPU pool, all of them different.

        Any thread may call it. `sources` must be in bounds; nothing checks it.
        """
        copy_rows(origin, np.asarray(sources, np.int64), self._rows, np.asarray(targets, np.int64))

    @property
    def content(self) -> torch.Tensor:
        """The bytes of all blocks, `[num_blocks + 1, block_bytes]`."""
        return self._bytes

    @property
    def waits_for_device(self) -> bool:
        """Whether reads and writes wait for a device: event loops leave them to threads."""
        return self.device.type != "cpu"

    @property
    def address(self) -> int:
        """Address of block 0, in this process or on its device."""
        return self._bytes.data_ptr()

    @property
    def _rows(self) -> Rows:
        return as_rows(self._bytes.numpy(), self.layout.block_bytes)

    def read_block(self, block_id: int) -> "memoryview[Any]":
        """Returns one block's bytes. On a CPU a view of the pool, valid until its release."""
        array: Any = self._bytes[block_id].cpu().numpy()  # some numpy releases type it as no buffer
        return memoryview(array)

    def write_block(self, block_id: int, content: "bytes | memoryview[Any]") -> None:
        """Writes one block; `content` is exactly `block_bytes` long."""
        source = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
        assert len(source) == self.layout.block_bytes, "content of another length than a block"
        self._bytes[block_id].copy_(source)


def _zeros(shape: tuple[int, int], device: torch.device, *, pinned: bool) -> torch.Tensor:
    """Returns zeroed memory; on a CPU, unless it is pinned, pages are taken when first written, as
    those of `SharedMemory`: an engine neither clears nor holds what it does not use."""
    if device.type != "cpu" or pinned:
        return torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
    pages = mmap.mmap(-1, math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


def _staging(num_bytes: int) -> torch.Tensor:
    """Returns pinned host memory, for full GPU bandwidth; torch caches it for the next call."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _copy_on_gpu(
    origin: torch.Tensor, target: torch.Tensor, sources: list[int], targets: list[int]
) -> bool:
    """Copies in one asynchronous launch. Returns False if the kernel cannot."""
    from baton_kernels.block_copy import copy_blocks

    collides = origin is target and not set(sources).isdisjoint(targets)
    is_apart = origin.is_cuda and target.is_cuda and origin.device != target.device
    if collides or is_apart:
        return False
    # On the device, in the order of its stream: host memory would have to outlive the kernel.
    upload = uploader(target.device if target.is_cuda else origin.device)
    copy_blocks(origin, target, upload(np.stack([sources, targets], axis=1)))
    return True


class KvCache:
    """KV cache of a model: the pools of all cache groups, the host pools that they swap to, and the
    pool of encoder outputs.

    Attributes:
        places: place of each layer of the model.
        pools: one per group; those without a window come first.
        host_pools: the same in host memory; empty if there is no swap space.
        scales: scales of each layer of the model; None where the cache is not fp8.
        encoder_pool: pool of encoder outputs, whose rows are K of one head of one layer; None for a
            model without an encoder.
    """

    def __init__(
        self,
        pools: list[KvPool],
        host_pools: list[KvPool],
        places: list[LayerPlace],
        scales: list[KvScales] | None = None,
        encoder_pool: KvPool | None = None,
    ) -> None:
        self.pools = pools
        self.host_pools = host_pools
        self.places = places
        self.scales: list[KvScales | None] = [*scales] if scales else [None] * len(places)
        self.encoder_pool = encoder_pool

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        return tuple(pool.layout for pool in self.pools)
