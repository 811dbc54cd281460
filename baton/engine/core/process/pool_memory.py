"""Memory of an engine's pools, which its process offers and its parent opens: shared memory of a
CPU by descriptor, memory of a GPU by CUDA IPC handle.
"""

import logging
from collections.abc import Sequence

import torch

from baton.engine.executor.cache.cuda_ipc import CudaDriver, CudaIpc, IpcPlace, MappedMemory
from baton.engine.executor.cache.kv_layout import pool_bytes
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.cache.shared_memory import SharedMemory
from baton.engine.executor.device import resolve_device, use_device
from baton.engine.facts import EngineFacts
from baton.engine.scheduler.sequences.batch_slots import NULL_BLOCK
from baton.errors import FailedPreconditionError

logger = logging.getLogger(__name__)

_SAMPLE = bytes(range(256))


class MemoryNotSharedError(FailedPreconditionError):
    """Memory of an engine's process on a GPU that the server cannot open. The engine can step in
    the server's process."""


def is_opened_by_handle(device: torch.device) -> bool:
    """Returns whether memory of this device is opened by CUDA IPC handle."""
    return device.type == "cuda"


def cuda_ipc() -> CudaIpc:
    """Returns the CUDA IPC interface of this process."""
    return CudaDriver()


class SampleMemory:
    """Sample of the memory of an engine's GPU, by which the parent finds out that it can open the
    pools.

    Attributes:
        device: the GPU.
        place: the place of the bytes, which exist as long as this object.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._content = torch.tensor(list(_SAMPLE), dtype=torch.uint8, device=device)
        self.place = cuda_ipc().export(self._content)


def sample_memory(name: str) -> SampleMemory | None:
    """Returns a sample of the memory of the device with this name, as of `resolve_device`; None for
    a CPU, whose memory is opened by descriptor.

    Raises the errors of `resolve_device`, and `MemoryNotSharedError` if this process can allocate
    or export no memory of the GPU.
    """
    try:
        device = resolve_device(name)
        return SampleMemory(device) if is_opened_by_handle(device) else None
    except RuntimeError as error:  # also torch's, in a fork of a process that has used CUDA
        raise _not_shared(name, str(error)) from error


def check_sample(place: IpcPlace, device: torch.device) -> None:
    """Raises `MemoryNotSharedError` unless this process can open a `SampleMemory`. Leaves this
    process with a context on the GPU, so that an engine that measures free memory counts it."""
    try:
        mapped = MappedMemory(place, len(_SAMPLE), device, cuda_ipc())
        try:
            content = bytes(mapped.content.cpu().numpy())
        finally:
            mapped.close()
    except RuntimeError as error:
        raise _not_shared(device, str(error)) from error
    if content != _SAMPLE:
        raise _not_shared(device, "it has other content here")


def descriptors_of(pools: Sequence[KvPool]) -> list[int]:
    """Returns the descriptors of pools in shared memory; none of pools on a GPU. Raises
    `FailedPreconditionError` for pools of a CPU that no other process can open."""
    if is_opened_by_handle(pools[0].device):
        return []
    descriptors = [pool.shared.fd for pool in pools if pool.shared is not None]
    if len(descriptors) < len(pools):
        raise FailedPreconditionError(
            "the KV pools are not in memory that processes can share, which an engine in a "
            "process of its own needs; give --engine-process no"
        )
    return descriptors


def places_of(pools: Sequence[KvPool]) -> tuple[IpcPlace, ...]:
    """Returns the places of pools on a GPU; none of pools of a CPU. Raises `MemoryNotSharedError`
    if the driver exports no memory."""
    if not is_opened_by_handle(pools[0].device):
        return ()
    ipc = cuda_ipc()
    try:
        return tuple(ipc.export(pool.content) for pool in pools)
    except RuntimeError as error:
        raise _not_shared(pools[0].device, str(error)) from error


def open_pools(
    facts: EngineFacts, places: Sequence[IpcPlace], descriptors: Sequence[int]
) -> list[KvPool]:
    """Returns the KV pools, and then the pool of encoder outputs if there is one, over the memory
    of an engine's process.

    Args:
        places: as of `places_of`.
        descriptors: as of `descriptors_of`; they belong to the pools from now on.

    Raises `MemoryNotSharedError` if memory of the GPU cannot be opened.
    """
    device, sizes = torch.device(facts.device), [*zip(facts.layouts, facts.num_blocks, strict=True)]
    if facts.encoder_layout is not None:
        sizes.append((facts.encoder_layout, facts.num_encoder_blocks))
    pools: list[KvPool] = []
    try:
        for place, (layout, count) in zip(places, sizes, strict=bool(places)):
            mapped = MappedMemory(place, pool_bytes(layout, count), device, cuda_ipc())
            pools.append(KvPool(layout, count, device, mapped=mapped))
            _compile_copies(pools[-1])
    except RuntimeError as error:
        close_pools(pools)
        raise _not_shared(device, str(error)) from error
    for descriptor, (layout, count) in zip(descriptors, sizes, strict=bool(descriptors)):
        shared = SharedMemory(descriptor, pool_bytes(layout, count))
        pools.append(KvPool(layout, count, device, shared))
    return pools


def _compile_copies(pool: KvPool) -> None:
    """Copies a block of a pool that nothing uses yet, so that no transfer waits for the kernel."""
    use_device(pool.device)
    pool.copy_content([NULL_BLOCK], [NULL_BLOCK + 1], pool.content)
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)


def close_pools(pools: Sequence[KvPool]) -> None:
    """Unmaps the memory of pools on a GPU, which no transfer uses any more. Idempotent."""
    for pool in pools:
        if pool.mapped is not None:
            try:
                pool.mapped.close()
            except RuntimeError as error:  # such as a lost device, with all its open memory
                logger.warning("the engine's memory could not be closed: %s", error)


def _not_shared(device: torch.device | str, problem: str) -> MemoryNotSharedError:
    return MemoryNotSharedError(
        f"the server cannot open the memory of its engine's process on {device}: {problem}; give "
        "--engine-process no"
    )
