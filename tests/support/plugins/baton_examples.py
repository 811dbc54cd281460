"""Plug-ins of a package outside of Baton, declared in the metadata beside it."""

import json
import os

import numpy as np
import xxhash

from baton.engine.scheduler.scheduling.policy import DecodeOrder, Policy
from baton.errors import UnavailableError
from baton_kvtransfer.connector import Connector, Integrity, Offer

LAST_COME = Policy(DecodeOrder.FIRST, lambda _request, arrival, _step: -float(arrival))


class Repeater:
    """Drafter that expects the last token again and again."""

    def __init__(self, *, model_path, vocab_size):
        self.vocab_size = vocab_size

    def propose(self, requests):
        last = [request.token_ids[-1] for request in requests]
        assert max(last) < self.vocab_size
        return [np.full(r.max_drafts, t, np.int32) for r, t in zip(requests, last, strict=True)]


class ProcMem(Connector):
    """KV connector that reads blocks by the kernel's view of another process's memory."""

    name = "proc-mem"
    has_checksums = False

    async def offer(self):
        places = [(pool.address, pool.num_blocks) for pool in self.pools]
        return Offer(metadata=json.dumps({"pid": os.getpid(), "pools": places}).encode())

    async def attach(self, offer):
        offer = json.loads(offer.metadata)
        try:
            memory = os.open(f"/proc/{offer['pid']}/mem", os.O_RDONLY)
        except OSError as error:
            raise UnavailableError(f"its memory cannot be read: {error.strerror}") from error
        return MemoryReceiver(memory, offer["pools"])


class MemoryReceiver:
    def __init__(self, memory, pools):
        self._memory = memory
        self._pools = pools
        self.is_open = True

    async def receive(self, run, pool, targets, integrity):
        address, num_blocks = self._pools[run.group]
        size = pool.layout.block_bytes
        for i, source in enumerate(run.sources(len(targets), num_blocks).tolist()):
            content = os.pread(self._memory, size, address + source * size)
            if integrity is Integrity.CHECKSUMS:
                run.check_block(i, xxhash.xxh3_64_intdigest(content))
            pool.write_block(targets[i], content)

    def close(self):
        if self.is_open:
            self.is_open = False
            os.close(self._memory)


class Sealed(ProcMem):
    """KV connector that opens no pool."""

    name = "sealed"

    async def offer(self):
        raise UnavailableError("its memory is sealed")
