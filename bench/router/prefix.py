"""Cost of a long prompt before it is computed: hash, look up, allocate, free.

Prompts of 32,768 tokens, 2,048 blocks of 16, of which the first 90% are cached. Timed is a request
from `add` to its blocks being free again, through the scheduler, with nothing computed; the hashes
are made of the tokens, or came with the request. SHA-256 alone over the same blocks is the
reference for the first.
"""

import hashlib
import time
from collections.abc import Callable

import numpy as np

from baton.cluster.prefix import hash_chain
from baton.engine.request import EngineRequest, KvSource
from baton.engine.scheduler.kv.block_pool import BlockPool
from baton.engine.scheduler.kv.cache_group import CacheGroup
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences.config import SchedulerConfig
from baton.engine.scheduler.sequences.sequence import Request
from baton.sampling import SamplingParams
from bench.report import Row, interleaved

BLOCK_SIZE = 16
NUM_BLOCKS = 2048
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
NUM_CACHED = NUM_BLOCKS * 9 // 10
NUM_REQUESTS = 20
AIM_MILLISECONDS = 3.0
ROOT = bytes(16)


def run(repeats: int) -> list[Row]:
    """Milliseconds a request, with hashing and without, and of SHA-256 alone."""
    load = _Load()
    contenders: dict[str, Callable[[], float]] = {
        "hashing": lambda: load.measure(with_hashes=False),
        "hashes given": lambda: load.measure(with_hashes=True),
        "sha": _sha,
    }
    figures = interleaved(contenders, repeats)
    rows = [
        Row(
            f"32k-token prompt at 90% hits, {case}",
            figures[case],
            "ms / request",
            "the aim",
            AIM_MILLISECONDS,
            AIM_MILLISECONDS / figures[case],
            1.0,
        )
        for case in ("hashing", "hashes given")
    ]
    sha, made = figures["sha"], figures["hashing"] - figures["hashes given"]
    return [
        *rows,
        Row("of which hashing", made, "ms / request", "SHA-256 alone", sha, sha / made, None),
    ]


class _Load:
    """A scheduler with a cached prefix, and prompts that share it."""

    def __init__(self) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=NUM_TOKENS,
            max_num_seqs=4,
            block_size=BLOCK_SIZE,
            max_model_len=NUM_TOKENS + 16,
            vocab_size=32_000,
        )
        self._scheduler = Scheduler(config, [CacheGroup(BlockPool(3 * NUM_BLOCKS))])
        self._random = np.random.default_rng(0)
        self._prefix = self._tokens(NUM_CACHED * BLOCK_SIZE)
        self._num_added = 0
        request = self._request(self._prefix, ())
        self._scheduler.add(request)
        self._scheduler.schedule()
        self._scheduler.commit_external(request.request_id, 1)
        self._scheduler.abort(request.request_id)

    def measure(self, *, with_hashes: bool) -> float:
        """The mean of some requests."""
        prompts = [self._prompt() for _ in range(NUM_REQUESTS)]
        hashes = [hash_chain(ROOT, p, BLOCK_SIZE) if with_hashes else () for p in prompts]
        requests = [self._request(p, h) for p, h in zip(prompts, hashes, strict=True)]
        start = time.perf_counter()
        for request in requests:
            self._scheduler.add(request)
            plan = self._scheduler.schedule()
            self._scheduler.abort(request.request_id)
            assert plan.external[0].num_hit_blocks == NUM_CACHED, "the prefix was not found"
        return (time.perf_counter() - start) / NUM_REQUESTS * 1e3

    def _prompt(self) -> list[int]:
        return self._prefix + self._tokens(NUM_TOKENS - len(self._prefix))

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(0, 32_000, count).tolist()
        return tokens

    def _request(self, token_ids: list[int], block_hashes: "list[bytes] | tuple[()]") -> Request:
        self._num_added += 1
        spec = EngineRequest(
            str(self._num_added),
            tuple(token_ids),
            SamplingParams(max_tokens=1),
            len(token_ids),
            kv_source=KvSource.EXTERNAL,
            block_hashes=tuple(block_hashes),
        )
        return Request(spec=spec, root=ROOT)


def _sha() -> float:
    """Milliseconds to hash one prompt's blocks, and nothing else."""
    blocks = [bytes(16 + 4 * BLOCK_SIZE)] * NUM_BLOCKS
    start = time.perf_counter()
    for block in blocks:
        hashlib.sha256(block).digest()
    return (time.perf_counter() - start) * 1e3
