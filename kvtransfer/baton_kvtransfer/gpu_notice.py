"""Notice of a worker on a GPU whose blocks move by gRPC. Independent of sources and settings."""

import logging
from collections.abc import Sequence

from baton.engine.executor.cache.kv_pool import KvPool
from baton.installation import install_command

_PER_TOKENS = 1000
_ADVICE = (
    "Install nixl on both workers (%s), or place them on one host, where each sees the other's GPU "
    "(cuda-ipc); --kv-connector auto takes either."
)

logger = logging.getLogger(__name__)


class GpuNotice:
    """Notice that blocks of a GPU move by gRPC, through the memory of both hosts. Logged once."""

    def __init__(self, pools: Sequence[KvPool], noun: str) -> None:
        """`noun`: the content of `pools`, as texts have it."""
        self._layouts = [pool.layout for pool in pools if pool.device.type != "cpu"]
        self._noun = noun

    def give(self, reason: str) -> None:
        """Logs the bytes that this takes, `reason` and advice; not for pools in host memory."""
        if not self._layouts:
            return
        per_token = sum(layout.block_bytes / layout.block_size for layout in self._layouts)
        megabytes = per_token * _PER_TOKENS / 1e6
        self._layouts = []
        logger.warning(
            "%s of this GPU moves by grpc (%s): %d tokens are up to %.1f MB, which are copied to "
            "host memory, checksummed, sent and copied to the other GPU: %.0f ms at 1 GB/s. "
            + _ADVICE,
            self._noun, reason, _PER_TOKENS, megabytes, megabytes, install_command("nixl"),
        )  # fmt: skip
