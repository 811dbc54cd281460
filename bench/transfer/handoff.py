"""Exposed handoff time: blocks sent chunk by chunk during prefill, against all of them at its end.

A local cluster of one prefill and one decode worker, asked directly, in the router's place. As the
router does, the decode worker is asked before the prefill worker, and fetches chunk by chunk; or it
is asked once the first token is there, and finds all blocks to be fetched. The exposed part is what
lies between the prefill worker's result and the decode worker's word that it holds everything. Of a
prompt of one chunk all of the transfer is exposed; of a longer one no more should be. So a prompt
that fits one step is computed in halves (`handoff_chunk_tokens`), here against one chunk. Caches
are off, so that every repetition computes its prompt. Tokens are asserted equal.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton import SamplingParams
from baton.cli.local.local_cluster import LocalCluster
from baton.cluster.keys import record_key
from baton.cluster.redis.client import connect, transact
from baton.cluster.registry.registry import WorkerRecord
from baton.serving.grpc.channels import Channels
from baton.v1.decode_pb2_grpc import DecodeStub
from baton.v1.prefill_pb2_grpc import PrefillStub
from baton_router.call.request import Request, work_of
from baton_router.lifecycle import worker_wire
from baton_router.routing.fleet.member import Member
from baton_router.routing.fleet.worker_model import PoolModel
from bench.report import Row
from bench.workload import VOCAB_SIZE, save_model

CHUNK = 128
NUM_CHUNKS = 15
# Of a step that holds the whole prompt, and fewest in a half of what is left of it.
STEP = 2048
HALF = 240
CONNECTORS = ("grpc", "shm")
_FIGURES = (("exposed", "exposed part"), ("second_token", "second token"), ("ttft", "first token"))

_PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Run:
    """One handoff. Times in milliseconds; the first two from the call on."""

    token_ids: list[int]
    ttft: float
    second_token: float
    exposed: float


def run(repeats: int) -> list[Row]:
    """Both ways of each connector, in turns, beside a prompt of one chunk; then a prompt of one
    step in halves and in one chunk, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        rows = []
        for connector in CONNECTORS:
            with _cluster(folder, connector, CHUNK) as cluster:
                rows += asyncio.run(_compared(cluster, connector, repeats))
            with (
                _cluster(folder, connector, STEP, HALF) as halved,
                _cluster(folder, connector, STEP, STEP) as whole,
            ):
                rows += asyncio.run(_halved(halved, whole, connector, repeats))
        return rows


def _cluster(folder: str, connector: str, step: int, half: int | None = None) -> LocalCluster:
    flags = {
        "prefix_caching": False,
        "num_blocks": 512,
        "max_num_batched_tokens": step,
        "handoff_chunk_tokens": half or step,
        "kv_connector": connector,
    }
    return LocalCluster(model=folder, worker_flags=flags)


def _prompt() -> tuple[int, ...]:
    source = random.Random(1)
    return tuple(source.randrange(3, VOCAB_SIZE) for _ in range(CHUNK * NUM_CHUNKS))


async def _compared(cluster: LocalCluster, connector: str, repeats: int) -> list[Row]:
    long = _prompt()
    together: list[Run] = []
    apart: list[Run] = []
    single: list[Run] = []
    async with _router_of(cluster) as router:
        for i in range(repeats + 1):
            runs = [
                await router.hand_over(long, overlaps=True),
                await router.hand_over(long, overlaps=False),
                await router.hand_over(long[:CHUNK], overlaps=True),
            ]
            assert runs[0].token_ids == runs[1].token_ids, "the two ways give other tokens"
            if i > 0:  # the first ones connect
                for kept, one in zip((together, apart, single), runs, strict=True):
                    kept.append(one)
    return _rows(connector, together, apart, single)


async def _halved(
    halved: LocalCluster, whole: LocalCluster, connector: str, repeats: int
) -> list[Row]:
    prompt, runs = _prompt(), list[tuple[Run, Run]]()
    async with _router_of(halved) as one, _router_of(whole) as other:
        for _ in range(repeats + 1):
            pair = [await router.hand_over(prompt, overlaps=True) for router in (one, other)]
            assert pair[0].token_ids == pair[1].token_ids, "halves give other tokens"
            runs.append((pair[0], pair[1]))
    in_halves, in_one = map(list, zip(*runs[1:], strict=True))  # the first ones connect
    name = f"{connector}, one step"
    return _differences(name, in_halves, "in one chunk", in_one)


def _rows(connector: str, together: list[Run], apart: list[Run], single: list[Run]) -> list[Row]:
    exposed, one_chunk = _median(together, "exposed"), _median(single, "exposed")
    case = f"{connector}, exposed of {NUM_CHUNKS} chunks"
    return [
        *_differences(connector, together, "without overlap", apart),
        Row(case, exposed, "ms", "one chunk's", one_chunk, one_chunk / exposed, None),
    ]


def _differences(name: str, runs: list[Run], against: str, others: list[Run]) -> list[Row]:
    rows = []
    for figure, what in _FIGURES:
        value, reference = _median(runs, figure), _median(others, figure)
        ratio = reference / value
        rows.append(Row(f"{name}, {what}", value, "ms", against, reference, ratio, None))
    return rows


def _median(runs: list[Run], figure: str) -> float:
    return float(statistics.median(getattr(run, figure) for run in runs))


class _Router:
    """As much of a router as a handoff needs."""

    def __init__(self, prefill: Member, decode: Member, channels: Channels) -> None:
        self._prefill = prefill
        self._decode = decode
        self._to_prefill: Any = PrefillStub(channels.get(prefill.record.endpoint))
        self._to_decode: Any = DecodeStub(channels.get(decode.record.endpoint))

    async def hand_over(self, prompt: tuple[int, ...], *, overlaps: bool) -> Run:
        """One request, from its first call to its last token."""
        work, lease_id = work_of(Request("handoff", prompt, _PARAMS)), worker_wire.new_lease_id()
        handle = worker_wire.handle(self._prefill, lease_id, work, [])
        asked = worker_wire.prefill_request(work, lease_id, self._decode.record.id)
        began = time.perf_counter()
        decoding = None
        if overlaps:
            decoding = self._to_decode.Generate(
                worker_wire.decode_request(work, lease_id, handle), timeout=_TIMEOUT
            )
            await decoding.read()
        prefilling = self._to_prefill.Prefill(asked, timeout=_TIMEOUT)
        await _until(prefilling, "result")
        first_at = time.perf_counter()
        if decoding is None:
            decoding = self._to_decode.Generate(
                worker_wire.decode_request(work, lease_id, handle), timeout=_TIMEOUT
            )
        await _until(decoding, "kv_ready")
        ready_at = time.perf_counter()
        token_ids, second_at = [], None
        while (event := await decoding.read()) is not grpc.aio.EOF:
            token_ids += event.tokens.token_ids
            if second_at is None and len(token_ids) > 1:
                second_at = time.perf_counter()
        assert second_at is not None, "an answer of one token"
        await _until(prefilling, "released")
        moments = (first_at - began, second_at - began, ready_at - first_at)
        return Run(token_ids, *(1000 * seconds for seconds in moments))


@asynccontextmanager
async def _router_of(cluster: LocalCluster) -> AsyncIterator[_Router]:
    redis, channels = connect(cluster.redis_url), Channels()
    try:
        names = ("prefill-0", "decode-0")
        found = await transact(redis, *(("HGETALL", record_key(name)) for name in names))
        prefill, decode = (_member(fields) for fields in found)
        yield _Router(prefill, decode, channels)
    finally:
        await channels.close()
        await redis.aclose()


def _member(fields: Mapping[bytes, bytes]) -> Member:
    return Member(WorkerRecord.from_fields(fields), PoolModel())


async def _until(call: Any, kind: str) -> None:
    """Reads a call up to an event of this kind."""
    while True:
        event = await call.read()
        assert event is not grpc.aio.EOF, f"the call ended without {kind}"
        if event.WhichOneof("event") == kind:
            return
