"""A cluster with two routers, each of whose processes may be replaced while requests run."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.ports import free_port
from baton.cli.local.process import Process
from baton.client.client import AsyncClient, Client
from baton.engine import LLM, EngineConfig
from baton.engine.scheduler.plan import TokenLogprobs
from baton.errors import BatonError
from baton.models import locate
from baton.sampling import SamplingParams
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.release import environment_of
from tests.support.cluster.watch import load_of

# On a machine that is busy with other tests.
_STARTS_WITHIN = 60.0
_STOPS_WITHIN = 30.0
_ANSWERS_WITHIN = 30.0

_ALONE = EngineConfig(device="cpu", dtype="float32", num_blocks=1024)
_CLEAR = 1e-3  # nats; what is computed again, in other steps, differs in last bits


Answer = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how it is continued, and what the engine alone makes of it: for each sequence its
    tokens. `of_new_weights`: what it makes of it with those that are rolled out."""

    prompt: tuple[int, ...]
    params: SamplingParams
    answer: Answer
    of_new_weights: Answer | None = None


def clear_question(params: SamplingParams) -> Question:
    """Returns a question whose greedy answer is the same wherever it is computed again: every token
    of it is chosen by more than what other steps may change. `params` ask for one greedy
    sequence."""
    prompts = [prompt_of(50, seed=seed) for seed in range(1, 6)]
    engine = LLM.from_pretrained(locate("tiny"), _ALONE)
    told = replace(params, logprobs=True, top_logprobs=2)
    margin, prompt, answer = max(
        (min(map(_margin_of, completion.logprobs)), prompt, completion.token_ids)
        for prompt, result in zip(prompts, engine.generate(prompts, [told] * 5), strict=True)
        for completion in result.completions
    )
    assert margin > _CLEAR
    return Question(tuple(prompt), params, (answer,))


def _margin_of(logprobs: TokenLogprobs) -> float:
    """By how many nats the chosen token is likelier than any other."""
    first, second = logprobs.top_logprobs
    return first - second


def questions_of(wanted: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Question]:
    """With their answers, computed in this process."""
    engine = LLM.from_pretrained(locate("tiny"), _ALONE)
    results = engine.generate([list(prompt) for prompt, _ in wanted], [p for _, p in wanted])
    return [
        Question(tuple(prompt), params, tuple(c.token_ids for c in result.completions))
        for (prompt, params), result in zip(wanted, results, strict=True)
    ]


def mixed_questions(max_tokens: int, parts: Sequence[int] = (1,)) -> list[Question]:
    """Greedy, seeded and several answers to prompts of four lengths, of these parts of their
    length."""
    greedy = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    seeded = replace(greedy, temperature=0.9, seed=17)
    several = replace(seeded, n=2, max_tokens=40)
    return questions_of(
        [
            (prompt_of(length, seed=length), replace(params, max_tokens=params.max_tokens // part))
            for length in (7, 60, 300, 700)
            for params in (greedy, seeded, several)
            for part in parts
        ]
    )


@dataclass
class Tally:
    """Outcomes of the requests of a load.

    Attributes:
        num_answered: with the right tokens.
        num_of_new_weights: those of them with the tokens of the new weights.
        failures: the errors that clients saw, and answers that were not the engine's.
    """

    num_answered: int = 0
    num_of_new_weights: int = 0
    num_migrations: int = 0
    num_resumed: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    async def more(self, number: int) -> None:
        """Returns once so many more have been answered; fails where that takes too long."""
        wanted, deadline = self.num_answered + number, time.monotonic() + _ANSWERS_WITHIN
        while self.num_answered < wanted:
            assert time.monotonic() < deadline, f"too slow for {number} answers: {self}"
            await asyncio.sleep(0.05)


class Pools:
    """Two routers over a `LocalCluster`.

    Attributes:
        drains: how many seconds each process took from SIGTERM to its end, by name.
    """

    def __init__(
        self, cluster: LocalCluster, second_router: Process, thread: ThreadPoolExecutor
    ) -> None:
        """`thread`: one, which outlives all that it starts: processes die with their starter."""
        self.cluster = cluster
        self._thread = thread
        self.routers = [cluster.process("router"), second_router]
        self.drains: dict[str, float] = {}

    @property
    def addresses(self) -> list[str]:
        return [router.endpoint for router in self.routers]

    @property
    def workers(self) -> list[Process]:
        return [process for process in self.cluster.processes if process.role != "router"]

    async def run(self, work: Callable[[], None]) -> None:
        """Has work done that starts processes, while this event loop goes on."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def replace(self, process: Process, release: Path | None = None) -> None:
        """Ends a process as an orchestrator does and starts its successor once it has gone: a
        router's where clients look for it, a worker's anywhere. Returns when all routers can use
        it.

        Args:
            release: a folder with another version of Baton, which the successor is of.
        """
        await self.run(partial(self._replace, process, release))

    def wait_complete(self) -> None:
        """Waits until all routers can use all workers."""
        self._wait_back(self.routers[-1], {})

    def _replace(self, process: Process, release: Path | None) -> None:
        self._end(process)
        if process.role != "router":
            taken: set[int] = {process.port}
            process.port = _new_port(taken)
            process.admin_port = _new_port(taken)
            process.metrics_port = _new_port(taken)
        before = self._epochs()
        with patch.dict(os.environ, {} if release is None else environment_of(release)):
            process.start(process.log_path.parent)
        self._wait_back(process, before)

    def _wait_back(self, process: Process, before: Mapping[str, int]) -> None:
        deadline = time.monotonic() + _STARTS_WITHIN
        while not self._is_back(process, before):
            assert process.is_running, process.failure()
            assert time.monotonic() < deadline, f"{process.name} is not back: {process.log_tail()}"
            time.sleep(0.05)

    def _end(self, process: Process) -> None:
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        assert process.wait(began + _STOPS_WITHIN), f"{process.name} runs on: {process.log_tail()}"
        assert "ended with code 0;" in process.failure()
        self.drains[process.name] = time.monotonic() - began

    def _is_back(self, process: Process, before: Mapping[str, int]) -> bool:
        for router in self.routers:
            ready = self._ready_at(router)
            if len(ready) < len(self.workers):
                return False
            name = process.worker_id
            if process.role != "router" and ready[name] <= before[name]:
                return False
        return True

    def _epochs(self) -> dict[str, int]:
        """Returns the latest epoch of each worker that any router has heard of."""
        known = Counter[str]()
        for router in self.routers:
            known |= Counter(self._ready_at(router, any_state=True))
        return known

    def _ready_at(self, router: Process, *, any_state: bool = False) -> dict[str, int]:
        """The epochs of the workers that a router would give work to."""
        try:
            with Client(router.admin_endpoint, timeout=2.0) as client:
                workers = client.list_workers()
        except BatonError:
            return {}
        return {w.id: w.epoch for w in workers if any_state or w.state == "ready"}


def _new_port(taken: set[int]) -> int:
    port = free_port(taken)
    taken.add(port)
    return port


@contextmanager
def pools(
    logs: Path, worker_drain_s: float = 5.0, model: str = "tiny", **flags: object
) -> Iterator[Pools]:
    """Two routers and two workers of each role, with these flags of the routers."""
    worker_flags = {
        "max_num_batched_tokens": 64,
        "num_blocks": 1024,
        "drain_timeout_s": worker_drain_s,
    }
    cluster = LocalCluster(
        model,
        num_prefill=2,
        num_decode=2,
        worker_flags=worker_flags,
        router_flags=flags,
        log_dir=logs,
    )
    with cluster:
        own = {"redis_url": cluster.redis_url, "model": model, "drain_timeout_s": 5.0, **flags}
        taken = {process.port for process in cluster.processes}
        second = Process("router-1", "router", _new_port(taken), own, admin_port=_new_port(taken))
        with ThreadPoolExecutor(1) as thread:
            try:
                second.start(logs)
                running = Pools(cluster, second, thread)
                running.wait_complete()
                yield running
            finally:
                second.signal(signal.SIGKILL)


@asynccontextmanager
async def under_load(
    pools: Pools, questions: Sequence[Question], num_readers: int
) -> AsyncIterator[Tally]:
    """So many readers ask one question after the other, over a client that knows both routers, for
    the length of the block; then those that are in flight end."""
    tally, over = Tally(), asyncio.Event()

    async def read(client: AsyncClient, first: int) -> None:
        number = first
        while not over.is_set():
            await _ask(client, questions[number % len(questions)], tally)
            number += 1

    async with AsyncClient(pools.addresses, timeout=60.0) as client:
        readers = [asyncio.create_task(read(client, i)) for i in range(num_readers)]
        try:
            await tally.more(num_readers)
            yield tally
        finally:
            over.set()
            await asyncio.gather(*readers)


async def _ask(client: AsyncClient, question: Question, tally: Tally) -> None:
    generation = client.generate(list(question.prompt), question.params)
    try:
        completions = await generation.completions()
    except BatonError as error:
        tally.failures[f"{type(error).__name__}: {error}"] += 1
        return
    answer = tuple(c.token_ids for c in completions)
    if answer not in (question.answer, question.of_new_weights):
        tally.failures[f"other tokens: {question.params}"] += 1
        return
    assert generation.finished is not None
    tally.num_answered += 1
    tally.num_of_new_weights += answer == question.of_new_weights
    tally.num_migrations += generation.finished.usage.num_migrations
    tally.num_resumed += generation.num_resumed


def is_busy(process: Process) -> bool:
    """Whether it has something to lose."""
    load = load_of(process.admin_endpoint)
    return load.num_running > 0 or load.num_leases > 0
