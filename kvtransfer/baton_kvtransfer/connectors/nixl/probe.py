"""Program that reads memory of its own by NIXL once, so that UCX prints how. Standard library only:
it starts within a tenth of a second, while importing this package takes seconds.

    python probe.py MODULE

`MODULE` is NIXL's bindings. What UCX uses and prints is chosen by the variables that `transport`
sets.
"""

import ctypes
import importlib
import sys
import time
from typing import Any

_NUM_BYTES = 2**20
_TIMEOUT = 10.0  # seconds


def main(module: str) -> None:
    nixl = importlib.import_module(module)
    source, reader = (_agent(nixl, name) for name in ("source", "reader"))
    pools = [ctypes.create_string_buffer(_NUM_BYTES) for _ in range(2)]
    theirs, own = (ctypes.addressof(pool) for pool in pools)
    for agent, address in ((source, theirs), (reader, own)):
        agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [(address, _NUM_BYTES, 0, "")]), [])
    name = reader.loadRemoteMD(source.getLocalMD()).decode()
    own_list, their_list = (
        nixl.nixlXferDList(nixl.DRAM_SEG, [(address, _NUM_BYTES, 0)]) for address in (own, theirs)
    )
    read = reader.createXferReq(nixl.NIXL_READ, own_list, their_list, name, b"", [])
    reader.postXferReq(read, b"")
    until = time.monotonic() + _TIMEOUT
    while reader.getXferStatus(read) == nixl.NIXL_IN_PROG:
        if time.monotonic() > until:
            sys.exit("the read did not end")
        time.sleep(0.001)


def _agent(nixl: Any, name: str) -> Any:
    config = nixl.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
    agent = nixl.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    return agent


if __name__ == "__main__":
    main(*sys.argv[1:])
