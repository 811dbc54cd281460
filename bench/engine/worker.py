"""One worker against the bare engine, with its engine in a thread and in a process of its own.

A decode worker computes prompts itself and streams tokens to a client in this process; the bare
engine steps in this process. Both use one thread ("apart": server and client have the other core of
two) or as many as there are cores ("shared"). Tokens are asserted equal. Then 64 clients come and
go: each sends requests of random lengths, one after the other, and cancels half of them. The time
between two messages of a stream is an inter-token latency.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from baton.cli.local.ports import HOST, free_port
from baton.cli.local.process import Process
from baton.engine import LLM, EngineConfig
from baton.rpc.params import params_to_message
from baton.sampling import SamplingParams
from baton.v1 import decode_pb2 as pb
from baton.v1 import decode_pb2_grpc as pb_grpc
from bench.engine.serve import Run, measured, through_engine
from bench.report import Row
from bench.workload import MAX_TOKENS, VOCAB_SIZE, prompts, save_model

if TYPE_CHECKING:
    from baton.v1.decode_pb2_grpc import DecodeAsyncStub

AIM_APART, AIM_SHARED, AIM_ITL = 0.9, 0.7, 1.0
NUM_CLIENTS = 64
CLIENT_SECONDS = 3.0
FORMS = {"thread": "no", "process": "yes"}
_START_SECONDS = 120.0
_PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
_CONFIG = {"device": "cpu", "dtype": "float32", "num_blocks": 1024, "prefix_caching": False}


def run(repeats: int) -> list[Row]:
    """Throughput of both forms as a ratio of the engine's, and latency of the one by the other."""
    num_cores = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for case, num_threads, aim in (("apart", 1, AIM_APART), ("shared", num_cores, AIM_SHARED)):
            config = EngineConfig(**_CONFIG, num_threads=num_threads)  # type: ignore[arg-type]
            engine = LLM.from_pretrained(folder, config)
            with ExitStack() as stack:
                workers = {
                    form: stack.enter_context(_worker(folder, num_threads, flag))
                    for form, flag in FORMS.items()
                }
                rows += asyncio.run(_compare(case, engine, workers, repeats, aim))
    return rows


@contextmanager
def _worker(folder: str, num_threads: int, engine_process: str) -> Iterator[str]:
    """A decode worker without Redis, until the block ends; yields its address."""
    flags = {**_CONFIG, "model": folder, "num_threads": num_threads}
    port, admin_port = free_port(set()), free_port(set())
    flags |= {"engine_process": engine_process, "metrics": False, "max_num_seqs": NUM_CLIENTS}
    worker = Process(f"decode-{port}", "decode", port, flags, admin_port=admin_port)
    worker.start(Path(folder) / "logs")
    try:
        yield f"{HOST}:{port}"
    finally:
        worker.signal(15)
        worker.wait(time.monotonic() + 30)


async def _compare(
    case: str, engine: LLM, workers: dict[str, str], repeats: int, aim: float
) -> list[Row]:
    """All in turns, after one unmeasured pass of each."""
    bare: list[float] = []
    served: dict[str, list[float]] = {form: [] for form in workers}
    latencies: dict[str, list[float]] = {form: [] for form in workers}
    async with AsyncStubs(workers) as stubs:
        for i in range(repeats + 1):
            expected = await asyncio.to_thread(through_engine, engine)
            for form, stub in stubs.items():
                found = await _through_worker(stub)
                assert found.token_ids == expected.token_ids, "served tokens differ"
                if i:
                    served[form].append(found.tokens_per_second)
                    latencies[form].append(await _p99_of_clients(stub, i))
            if i:
                bare.append(expected.tokens_per_second)
    reference = statistics.median(bare)
    rows = []
    for form, figures in served.items():
        value = statistics.median(figures)
        name = f"{case}, engine in a {form}"
        aimed = aim if form == "process" else None
        rows.append(
            Row(name, value, "tokens/s", "bare engine", reference, value / reference, aimed)
        )
    thread, process = (1000 * statistics.median(latencies[form]) for form in FORMS)
    name = f"{case}, p99 ITL, {NUM_CLIENTS} clients come and go"
    rows.append(Row(name, process, "ms", "engine in a thread", thread, thread / process, AIM_ITL))
    return rows


class AsyncStubs:
    """Stubs of the workers by their form, once they are ready, until the block ends."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._channels = {form: grpc.aio.insecure_channel(a) for form, a in addresses.items()}

    async def __aenter__(self) -> "dict[str, DecodeAsyncStub]":
        stubs: dict[str, DecodeAsyncStub] = {
            form: pb_grpc.DecodeStub(channel) for form, channel in self._channels.items()
        }
        for stub in stubs.values():
            async with asyncio.timeout(_START_SECONDS):
                await _until_ready(stub)
        return stubs

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels.values():
            await channel.close()


async def _until_ready(stub: "DecodeAsyncStub") -> None:
    while True:
        try:
            await _tokens_of(stub, "ready", [5, 6, 7], 1, [])
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.2)
        else:
            return


async def _tokens_of(
    stub: "DecodeAsyncStub",
    name: str,
    prompt: list[int],
    max_tokens: int,
    moments: list[float],
) -> list[int]:
    """Returns the tokens of one request; adds the moment of each to `moments`."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    request = pb.DecodeGenerateRequest(
        request_id=name,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=params_to_message(params),
    )
    token_ids: list[int] = []
    async for response in stub.Generate(request):
        new = response.tokens.token_ids
        token_ids += new
        moments += [time.perf_counter()] * len(new)
    return token_ids


async def _through_worker(stub: "DecodeAsyncStub") -> Run:
    """All prompts at once, as concurrent streams."""
    batch = prompts()
    moments: list[list[float]] = [[] for _ in batch]
    start = time.perf_counter()
    token_ids = await asyncio.gather(
        *(_tokens_of(stub, f"run {i}", batch[i], MAX_TOKENS, moments[i]) for i in range(len(batch)))
    )
    return measured(start, token_ids, moments)


async def _p99_of_clients(stub: "DecodeAsyncStub", seed: int) -> float:
    """Returns the 99th percentile of the seconds between messages of a stream."""
    gaps: list[float] = []
    deadline = time.perf_counter() + CLIENT_SECONDS

    async def client(number: int) -> None:
        dice = random.Random(1000 * seed + number)
        for i in count():
            if time.perf_counter() >= deadline:
                return
            prompt = [dice.randrange(3, VOCAB_SIZE) for _ in range(dice.randint(8, 64))]
            moments: list[float] = []
            patience = dice.choice([None, dice.uniform(0.1, 1.0)])
            try:
                async with asyncio.timeout(patience):
                    await _tokens_of(stub, f"client {number} {i}", prompt, 32, moments)
            except TimeoutError:
                pass
            gaps.extend(b - a for a, b in pairwise(moments))

    await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    return statistics.quantiles(gaps, n=100)[98]
