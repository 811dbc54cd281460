"""NIXL as it comes, for `bench.transfer.transfer`: one READ of 256 MiB out of another process.

Run as a program it is that other process: it prints what its agent says of itself
and where its memory lies, and serves until its standard input ends.
"""

import base64
import json
import sys
import time
from typing import Any

import numpy as np

from baton_kvtransfer.connectors.nixl.agent import load
from bench.transfer.bare import NUM_BYTES


def _registered(name: str, memory: "np.ndarray[Any, np.dtype[np.uint8]]") -> Any:
    nixl = load()
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.pthrDelay = 10_000
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = nixl.nixlAgent(name, config)
    agent.createBackend("UCX", {"ucx_devices": "lo"})
    place = (memory.ctypes.data, len(memory), 0, "")
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [place]), [])
    return agent


class BareReader:
    """Reads the other process's memory into `memory`, whose blocks lie anywhere there."""

    def __init__(
        self, memory: "np.ndarray[Any, np.dtype[np.uint8]]", block_bytes: int, about: str
    ) -> None:
        metadata, address = json.loads(about)
        self._nixl = load()
        self._agent = _registered("bare reader", memory)
        peer = self._agent.loadRemoteMD(base64.b64decode(metadata)).decode()
        self._count = count = NUM_BYTES // block_bytes

        def blocks(name: str, start: int) -> int:
            row = np.array([[start, block_bytes, 0, block_bytes, count]], np.uint64)
            return int(self._agent.prepXferDlist(name, self._nixl.DRAM_SEG, row, []))

        self._here = blocks(self._nixl.NIXL_INIT_AGENT, memory.ctypes.data)
        self._there = blocks(peer, address)

    def seconds(self) -> float:
        sources = np.random.default_rng(0).permutation(self._count).astype(np.int32)
        targets = np.arange(self._count, dtype=np.int32)
        start = time.perf_counter()
        read = self._agent.makeXferReq(
            self._nixl.NIXL_READ, self._here, targets, self._there, sources, b"", [], False
        )
        state = self._agent.postXferReq(read, b"")
        while state == self._nixl.NIXL_IN_PROG:
            state = self._agent.getXferStatus(read)
        elapsed = time.perf_counter() - start
        assert state == self._nixl.NIXL_SUCCESS, state
        self._agent.releaseXferReq(read)
        return elapsed


def main() -> None:
    memory = np.ones(NUM_BYTES, np.uint8)
    agent = _registered("bare source", memory)
    metadata = base64.b64encode(agent.getLocalMD()).decode()
    print(json.dumps([metadata, memory.ctypes.data]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
