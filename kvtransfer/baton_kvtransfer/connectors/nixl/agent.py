"""NIXL, as far as it is used here: pools that are registered, and one-sided reads between them.

Knows no lease and no event loop. It goes below NIXL's own Python layer, which pickles descriptors,
prints its log, and lets a progress thread spin while nothing happens.
"""

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.engine.cache.kv_pool import KvLayout, KvPool
from baton.errors import UnavailableError

# A source's thread wakes when somebody wants something of it, and this often in case it was not
# told.
_WAKE_US = 10_000
# What another worker says of its agent is some hundred bytes for each device of it.
MAX_METADATA_BYTES = 2**20
# Their numbers are 32 bits long.
_MOST_BLOCKS = 2**31 - 1
# Between two looks at a read that is under way, and how long one call looks.
_PAUSE_S, _LOOK_S = 5e-5, 1e-3
# Of UCX, unless somebody has said otherwise: its log is none of what this process prints, and what
# becomes of a signal is not for a library to say.
_ENVIRONMENT = {
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
    "UCX_HANDLE_ERRORS": "none",
    "NIXL_LOG_LEVEL": "FATAL",
}


@dataclass(frozen=True, slots=True)
class Region:
    """Memory region of a pool: its block 0, and the blocks after it.

    Attributes:
        address: in its process, or on its device.
        device: of CUDA, by number; None for host memory.
        num_blocks: not counting block 0.
    """

    address: int
    device: int | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """Metadata by which another agent reads pools: this agent's name, and the regions."""

    metadata: bytes
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another agent that is known here, and its pools as lists of blocks, by NIXL's handles."""

    name: str
    blocks: tuple[int, ...]


class Agent:
    """Pools, registered once, until `close`. Every call blocks, and all come from one thread.

    Attributes:
        regions: where the pools lie.
        metadata: what other agents need to reach this one.
        is_open: whether it can still do anything.
    """

    def __init__(self, pools: Sequence[KvPool], devices: str | None, *, is_read: bool) -> None:
        """Args:
            devices: of the network, as UCX names them; None for all.
            is_read: others read these pools, which then has to go on by itself.

        Raises `UnavailableError` where there is no NIXL, or it cannot have the pools.
        """
        self._nixl = load()
        self._errors = _errors(self._nixl)
        self._layouts: tuple[KvLayout, ...] = tuple(pool.layout for pool in pools)
        self.regions = tuple(map(_region, pools))
        self._num_known: Counter[str] = Counter()
        self._held = list(pools)  # what is registered must stay
        on_gpu = any(region.device is not None for region in self.regions)
        self._goes_on_by_itself = is_read or on_gpu or _has_rdma()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = is_read
        config.useListenThread = False
        config.pthrDelay = _WAKE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        options = {} if devices is None else {"ucx_devices": devices}
        try:
            self._agent: Any = self._nixl.nixlAgent(f"baton-{secrets.token_hex(16)}", config)
            self._agent.createBackend("UCX", options)
            for region, layout in zip(self.regions, self._layouts, strict=True):
                size = (region.num_blocks + 1) * layout.block_bytes
                place = (region.address, size, region.device or 0, "")
                self._agent.registerMem(self._nixl.nixlRegDList(self._kind(region), [place]), [])
            self.is_open = True
            self.metadata: bytes = self._agent.getLocalMD()
            self._own = () if is_read else self._blocks(self._nixl.NIXL_INIT_AGENT, self.regions)
        except self._errors as error:
            raise UnavailableError(f"nixl cannot have the pools: {error}") from error

    def connect(self, offer: NixlOffer) -> Peer:
        """Makes another one's pools known. Raises `UnavailableError` if that cannot be."""
        if len(offer.regions) != len(self._layouts):
            raise UnavailableError(f"the other worker has {len(offer.regions)} pools")
        if len(offer.metadata) > MAX_METADATA_BYTES:
            raise UnavailableError("the other worker's nixl says too much of itself")
        try:
            name = self._agent.loadRemoteMD(offer.metadata).decode()
            self._num_known[name] += 1
            try:
                return Peer(name, self._blocks(name, offer.regions))
            except BaseException:
                self._forget(name)
                raise
        except self._errors as error:
            raise UnavailableError(f"nixl cannot read the other worker's pools: {error}") from error

    def disconnect(self, peer: Peer) -> None:
        """Forgets another one, from whom nothing is being read."""
        if not self.is_open:
            return
        with suppress(*self._errors):  # a peer that was lost is forgotten already
            for blocks in peer.blocks:
                self._agent.releasedDlistH(blocks)
        self._forget(peer.name)

    def read(
        self, peer: Peer, group: int, sources: "npt.NDArray[np.int64]", targets: Sequence[int]
    ) -> int:
        """Begins to copy blocks of a peer's pool into this one's. Gives what `is_done` asks for.

        On memory of this host it may well be done when this returns. Raises `UnavailableError` if
        the peer cannot be reached, or the agent is closed.
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
            raise _gone(error) from error
        try:
            self._agent.postXferReq(read, b"")
        except self._errors as error:
            self.release(read)
            raise _gone(error) from error
        return read

    def is_done(self, read: int) -> bool:
        """Goes on with a read for a moment. Raises `UnavailableError` once the peer is lost, or the
        agent is closed."""
        if not self.is_open:
            raise _closed()
        until = time.monotonic() + _LOOK_S
        try:
            while self._agent.getXferStatus(read) == self._nixl.NIXL_IN_PROG:
                if time.monotonic() > until:
                    return False
                time.sleep(_PAUSE_S)
        except self._errors as error:
            raise _gone(error) from error
        return True

    def release(self, read: int) -> None:
        """Forgets a read that is done or has failed."""
        if self.is_open:
            with suppress(*self._errors):  # then it is forgotten with the agent
                self._agent.releaseXferReq(read)

    def leave(self) -> None:
        """Ends every read it has under way: none writes anything from now on.

        Of one whose peer does not answer nothing less than ending the agent can promise that,
        unless reads go on only when they are asked to: then it is never asked again, and keeps its
        connections until `close`.
        """
        self.is_open = False
        if self._goes_on_by_itself:
            self.close()

    def close(self) -> None:
        """The same, and lets go of its connections and of the pools. Idempotent."""
        self.is_open = False
        self._agent = None
        self._held.clear()

    def _forget(self, name: str) -> None:
        """A peer may be known twice, while one who reads from it has yet to end."""
        self._num_known[name] -= 1
        if not self._num_known[name]:
            del self._num_known[name]
            with suppress(*self._errors):
                self._agent.invalidateRemoteMD(name)

    def _blocks(self, name: str, regions: Sequence[Region]) -> tuple[int, ...]:
        """Each pool as a list of blocks, of which reads name some by their numbers."""
        return tuple(
            self._agent.prepXferDlist(
                name, self._kind(region), _strided(region, layout.block_bytes), []
            )
            for region, layout in zip(regions, self._layouts, strict=True)
        )

    def _kind(self, region: Region) -> Any:
        return self._nixl.DRAM_SEG if region.device is None else self._nixl.VRAM_SEG


def is_installed() -> bool:
    return find_spec("nixl") is not None


def _has_rdma() -> bool:
    """Whether a device of this host may write to memory, of which no process takes notice."""
    return any(Path("/sys/class/infiniband").glob("*"))


def load() -> Any:
    """NIXL's bindings. Takes half a second, once. Raises `UnavailableError` if it has none."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    raises = logging.raiseExceptions
    try:
        from nixl import _bindings
    except (ImportError, OSError) as error:
        raise UnavailableError(
            f"nixl is not to be had ({error}); pip install 'baton-serve[nixl]'"
        ) from error
    logging.raiseExceptions = raises
    log = logging.getLogger("nixl")
    log.handlers.clear()
    log.propagate = True
    return _bindings


def _errors(nixl: Any) -> tuple[type[Exception], ...]:
    """All that its calls raise, also for values that cannot be; they have no class in common."""
    named = (getattr(nixl, name) for name in dir(nixl) if name.endswith("Error"))
    return (RuntimeError, ValueError, TypeError, OverflowError, *named)


def _region(pool: KvPool) -> Region:
    device = None if pool.device.type == "cpu" else pool.device.index or 0
    return Region(pool.address, device, pool.num_blocks)


def _strided(region: Region, block_bytes: int) -> "npt.NDArray[np.uint64]":
    """One row: where, how long, on which device, how far apart, how many."""
    if not 0 <= region.num_blocks < _MOST_BLOCKS:
        raise ValueError(f"a pool of {region.num_blocks} blocks")
    count = region.num_blocks + 1
    row = (region.address, block_bytes, region.device or 0, block_bytes, count)
    return np.array([row], np.uint64)


def _closed() -> UnavailableError:
    return UnavailableError("another worker stood still while its memory was being read")


def _gone(error: Exception) -> UnavailableError:
    return UnavailableError(f"the worker whose memory was being read is gone: {error}")
