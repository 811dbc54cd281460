"""NIXL agent: registered pools, and one-sided reads between them. Without leases or an event loop.

It calls NIXL's bindings below NIXL's own Python layer, which pickles descriptors, prints its log,
and lets a progress thread spin while idle.
"""

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.executor.cache.kv_layout import KvLayout
from baton.engine.executor.cache.kv_pool import KvPool
from baton.engine.executor.device import use_device
from baton.errors import UnavailableError
from baton.installation import install_command
from baton_kvtransfer.connector import Offer, Region

# Microseconds after which a source's progress thread wakes even without an event.
_WAKE_US = 10_000
# Limit for a peer's metadata, which has some hundred bytes for each of its network devices.
MAX_METADATA_BYTES = 2**20
# Block indices of a read have 32 bits.
_MOST_BLOCKS = 2**31 - 1
# Pause between two polls of a read in flight, and the maximum duration of one `is_done`.
_PAUSE_S, _POLL_S = 5e-5, 1e-3
# Defaults of UCX and NIXL, unless the environment sets them: errors alone are logged, to stderr,
# and UCX installs no signal handlers in this process.
_ENVIRONMENT = {
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
    "UCX_HANDLE_ERRORS": "none",
    "NIXL_LOG_LEVEL": "FATAL",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Remote agent, with NIXL's handles of the block lists of its pools."""

    name: str
    blocks: tuple[int, ...]


class Agent:
    """NIXL agent that has pools registered until `close`. Calls block; all are from one thread.

    Attributes:
        offer: metadata by which other agents connect to this one, and the regions of the pools.
        is_open: whether it can still connect and read.
    """

    def __init__(self, pools: Sequence[KvPool], devices: str | None, *, is_read: bool) -> None:
        """Args:
            devices: network devices as UCX names them; None for all.
            is_read: whether others read these pools, for which NIXL runs a progress thread.

        Raises `UnavailableError` if NIXL is missing or cannot register the pools.
        """
        if any(pool.mapped is not None for pool in pools):
            raise UnavailableError(
                "nixl registers no GPU memory of another process, such as the engine's; give "
                "--engine-process no"
            )
        self._nixl = load()
        self._errors = _errors(self._nixl)
        self._layouts: tuple[KvLayout, ...] = tuple(pool.layout for pool in pools)
        num_blocks = tuple(pool.num_blocks for pool in pools)
        own = Offer(num_blocks=num_blocks, regions=tuple(map(_region, pools)))
        self._num_known: Counter[str] = Counter()
        self._held = list(pools)  # registered memory must stay allocated
        on_gpu = any(region.device is not None for region in own.regions)
        self._progresses_unpolled = is_read or on_gpu or _has_rdma()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = is_read
        config.useListenThread = False
        config.pthrDelay = _WAKE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        if devices is not None:
            # Not NIXL's `device_list`, which adds an InfiniBand port to the name of each device.
            os.environ["UCX_NET_DEVICES"] = devices
        try:
            self._agent: Any = self._nixl.nixlAgent(f"baton-{secrets.token_hex(16)}", config)
            self._agent.createBackend("UCX", {})
            for region, pool in zip(own.regions, pools, strict=True):
                size = (pool.num_blocks + 1) * pool.layout.block_bytes
                place = (region.address, size, region.device or 0, "")
                self._agent.registerMem(self._nixl.nixlRegDList(self._kind(region), [place]), [])
            self.is_open = True
            self.offer = replace(own, metadata=self._agent.getLocalMD())
            self._own = () if is_read else self._blocks(self._nixl.NIXL_INIT_AGENT, own)
        except self._errors as error:
            raise UnavailableError(f"nixl cannot have the pools: {error}") from error

    def connect(self, offer: Offer) -> Peer:
        """Adds a remote agent and its pools. Raises `UnavailableError` if NIXL rejects them."""
        if not len(offer.regions) == len(offer.num_blocks) == len(self._layouts):
            raise UnavailableError(f"the other worker has {len(offer.regions)} pools")
        if len(offer.metadata) > MAX_METADATA_BYTES:
            raise UnavailableError("the other worker's nixl says too much of itself")
        try:
            name = self._agent.loadRemoteMD(offer.metadata).decode()
            self._num_known[name] += 1
            try:
                return Peer(name, self._blocks(name, offer))
            except BaseException:
                self._forget(name)
                raise
        except self._errors as error:
            raise UnavailableError(f"nixl cannot read the other worker's pools: {error}") from error

    def disconnect(self, peer: Peer) -> None:
        """Removes a peer from which no read is in flight."""
        if not self.is_open:
            return
        with suppress(*self._errors):  # NIXL has removed a lost peer already
            for blocks in peer.blocks:
                self._agent.releasedDlistH(blocks)
        self._forget(peer.name)

    def read(
        self, peer: Peer, group: int, sources: "npt.NDArray[np.int64]", targets: Sequence[int]
    ) -> int:
        """Starts to copy blocks of a peer's pool into this agent's. Returns a handle for `is_done`.

        A read on the same host may be done on return. Raises `UnavailableError` if the peer cannot
        be reached, or the agent is closed.
        """
        if not self.is_open:
            raise _closed()
        try:
            read: int = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                self._own[group],
                np.asarray(targets, np.int32),
                peer.blocks[group],
                sources.astype(np.int32),
                b"",
                [],
                False,
            )
        except self._errors as error:
            raise _peer_lost(error) from error
        try:
            self._agent.postXferReq(read, b"")
        except self._errors as error:
            self.release(read)
            raise _peer_lost(error) from error
        return read

    def is_done(self, read: int) -> bool:
        """Polls a read for up to `_POLL_S` seconds, by which it progresses. Raises
        `UnavailableError` if the peer is lost, or the agent is closed."""
        if not self.is_open:
            raise _closed()
        until = time.monotonic() + _POLL_S
        try:
            while self._agent.getXferStatus(read) == self._nixl.NIXL_IN_PROG:
                if time.monotonic() > until:
                    return False
                time.sleep(_PAUSE_S)
        except self._errors as error:
            raise _peer_lost(error) from error
        return True

    def release(self, read: int) -> None:
        """Releases a read that is done or has failed."""
        if self.is_open:
            with suppress(*self._errors):  # closing the agent releases it otherwise
                self._agent.releaseXferReq(read)

    def end_reads(self) -> None:
        """Ends all reads in flight: none of them writes any more.

        If a peer does not answer, only closing the agent guarantees this, unless reads progress
        only when polled: then none is polled again, and connections stay open until `close`.
        """
        self.is_open = False
        if self._progresses_unpolled:
            self.close()

    def close(self) -> None:
        """Ends all reads and releases connections and pools. Idempotent."""
        self.is_open = False
        self._agent = None
        self._held.clear()

    def _forget(self, name: str) -> None:
        """Removes a peer's metadata with its last `Peer`; an older one may still have reads."""
        self._num_known[name] -= 1
        if not self._num_known[name]:
            del self._num_known[name]
            with suppress(*self._errors):
                self._agent.invalidateRemoteMD(name)

    def _blocks(self, name: str, offer: Offer) -> tuple[int, ...]:
        """Returns a handle per pool for the list of its blocks, which reads refer to by index."""
        return tuple(
            self._agent.prepXferDlist(
                name, self._kind(region), _strided(region, count, layout.block_bytes), []
            )
            for region, count, layout in zip(
                offer.regions, offer.num_blocks, self._layouts, strict=True
            )
        )

    def _kind(self, region: Region) -> Any:
        return self._nixl.DRAM_SEG if region.device is None else self._nixl.VRAM_SEG


def agent_thread(
    name: str,
    pools: Sequence[KvPool],
    use: Callable[[torch.device], None] = use_device,
) -> ThreadPoolExecutor:
    """Returns a thread for all calls of one agent, with the CUDA context of its pools, if any:
    it calls `use` for their devices when it starts."""
    devices = {pool.device for pool in pools}
    return ThreadPoolExecutor(1, name, lambda: [*map(use, devices)])


def is_installed() -> bool:
    return find_spec("nixl") is not None


def _has_rdma() -> bool:
    """Returns whether this host has RDMA devices, which write to memory without any process."""
    return any(Path("/sys/class/infiniband").glob("*"))


def load() -> Any:
    """Imports NIXL's bindings, once, in 0.5 s. Raises `UnavailableError` if there are none."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    raises = logging.raiseExceptions
    try:
        from nixl import _bindings
    except (ImportError, OSError) as error:
        raise UnavailableError(
            f"nixl cannot be imported ({error}); {install_command('nixl')}"
        ) from error
    logging.raiseExceptions = raises
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    return _bindings


def _errors(nixl: Any) -> tuple[type[Exception], ...]:
    """Returns all exceptions of NIXL's calls, also for bad values; they share no base class."""
    named = (getattr(nixl, name) for name in dir(nixl) if name.endswith("Error"))
    return (RuntimeError, ValueError, TypeError, OverflowError, *named)


def _region(pool: KvPool) -> Region:
    device = None if pool.device.type == "cpu" else pool.device.index or 0
    return Region(pool.address, device)


def _strided(region: Region, num_blocks: int, block_bytes: int) -> "npt.NDArray[np.uint64]":
    """Returns one row: address, block size, device, stride (sizes in bytes) and block count."""
    if not 0 <= num_blocks < _MOST_BLOCKS:
        raise ValueError(f"a pool of {num_blocks} blocks")
    row = (region.address, block_bytes, region.device or 0, block_bytes, num_blocks + 1)
    return np.array([row], np.uint64)


def _closed() -> UnavailableError:
    return UnavailableError("another worker stood still while its memory was being read")


def _peer_lost(error: Exception) -> UnavailableError:
    return UnavailableError(f"the worker whose memory was being read is gone: {error}")
