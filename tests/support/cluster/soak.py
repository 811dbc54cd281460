"""Soak test: requests for some minutes while everything is broken at random.

Two workers of each role, a router and a Redis are killed, stopped, flushed and restarted, both
workers of a role at once too; workers are drained, which migrates what they run, and take the other
role for a while; the network between all of them is cut, one way or both, slowed, and damages
blocks, each in its own time; some clients leave. Every other answer is compared with the
undisturbed one. The memory, descriptors and threads of the processes are sampled; without faults
they show what a steady load alone does to a process.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from baton.cli.local.local_cluster import LocalCluster
from baton.cli.local.process import Process
from baton.client.client import AsyncClient, Client
from baton.cluster.redis.client import connect, transact
from baton.errors import BatonError, OverloadedError, UnavailableError
from baton.sampling import SamplingParams
from tests.support.cluster import named_clusters
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.network import REDIS, Network
from tests.support.cluster.process_samples import Samples
from tests.support.cluster.sampling_modes import CODE, WAYS
from tests.support.cluster.watch import held
from tests.support.engine import deferred_stream
from tests.support.proxy import corrupted, duplicated, once, reordered, truncated

IN_FLIGHT = 20
SHARE_LEAVING = 0.1
# A worker that was killed is there again within this, on a machine that is busy.
BACK_WITHIN = 60.0
HELD_WITHIN = 5.0
# Seconds that a process stays away: a model of some size takes a while to be loaded, and a request
# that loses two workers within a few tokens is taken for poison.
AWAY = (0.0, 10.0)

# Tokens and seed for each prompt. In float32 the cumulative probabilities of a token differ by up
# to 2e-6 from batch to batch, so a draw as near to one of them may give another token. Of hundreds
# of seeds these draw the farthest from any: 1.2e-6 or more, in the ways that draw.
LENGTHS_AND_SEEDS = ((40, 122), (80, 333), (160, 157), (240, 396))

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the tokens of its sequences when nothing disturbs it."""

    prompt: Prompt
    params: SamplingParams
    answer: list[tuple[int, ...]]

    def __str__(self) -> str:
        length = len(self.prompt)
        return f"a prompt of {length}, {self.params}"


@dataclass
class Report:
    """Outcomes of all requests and faults."""

    num_requests: int = 0
    num_left: int = 0
    num_migrations: int = 0
    num_resumed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    held: dict[str, str] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)

    def __str__(self) -> str:
        lines = {
            "requests": f"{self.num_requests}, of which {self.num_left} left by their clients",
            "faults": f"{self.faults.total()}: {_listed(self.faults)}",
            "migrations": f"{self.num_migrations}, and {self.num_resumed} to another router",
            "refused": f"{self.refused.total()} {_listed(self.refused)}",
            "lost": f"{len(self.lost)} {self.lost[:8] or ''}",
            "wrong": f"{len(self.wrong)} {self.wrong[:3] or ''}",
            "held at end": f"{len(self.held)} {self.held or ''}",
            **self.samples.summary(),
        }
        return "\n".join(f"{name:14} {value}".rstrip() for name, value in lines.items())


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))


def run(
    seconds: float, seed: int = 0, *, faults: bool = True, in_flight: int = IN_FLIGHT
) -> Report:
    """A whole soak: about as long as `seconds`, and the start of a cluster and its answers."""
    chance = random.Random(seed)
    if not faults:
        with named_clusters.pair() as cluster:
            return asyncio.run(_Soak(cluster, None, chance, in_flight).run(seconds))
    in_place = ("decode-1",)
    with named_clusters.networked(in_place, conditional_disaggregation=True) as shape:
        soak = _Soak(shape.cluster, shape.network, chance, in_flight)
        return asyncio.run(soak.run(seconds))


def _shortened(params: SamplingParams, max_tokens: int, seed: int) -> SamplingParams:
    min_tokens = min(params.min_tokens, max_tokens)
    return replace(params, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens)


class _Soak:
    def __init__(
        self, cluster: LocalCluster, network: Network | None, chance: random.Random, in_flight: int
    ) -> None:
        self._cluster = cluster
        self._network = network
        self._chance = chance
        self._in_flight = in_flight
        self._report = Report()
        self._ends_at = 0.0
        # One fault at a time for each worker.
        self._locks = {p.name: asyncio.Lock() for p in cluster.processes if p.role != "router"}

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._ends_at

    async def run(self, seconds: float) -> Report:
        # A ranked request begins again with every worker it loses, and ends when there is peace.
        patience = seconds + BACK_WITHIN
        async with AsyncClient(
            self._cluster.address, timeout=patience, wait_for_ready=True
        ) as client:
            questions = await self._questions(client)
            self._ends_at = time.monotonic() + seconds
            lanes = [] if self._network is None else self._lanes(self._network)
            clients = [self._ask_again(client, questions) for _ in range(self._in_flight)]
            sampling = self._sample_again(max(1.0, seconds / 720))
            # A fault that is not repaired ends all: without its worker the rest would be waiting.
            async with asyncio.timeout(seconds + 3 * BACK_WITHIN), asyncio.TaskGroup() as tasks:
                for work in (*lanes, *clients, sampling):
                    tasks.create_task(work)
        await self._note_held()
        return self._report

    def _lanes(self, network: Network) -> list[Coroutine[Any, Any, None]]:
        """Each breaks one thing after the other, with its mean pause in seconds."""
        return [
            self._break_again(self._worker_fault("prefill"), 4.0),
            self._break_again(self._worker_fault("decode"), 4.0),
            self._break_again(self._both_killed, 30.0),
            self._break_again(self._role_changed, 15.0),
            self._break_again(partial(self._network_fault, network), 5.0),
            self._break_again(partial(self._redis_fault, network), 10.0),
            self._break_again(self._router_fault, 20.0),
        ]

    # Requests.

    async def _questions(self, client: AsyncClient) -> list[Question]:
        """With their answers, while all is well."""
        prompts: list[Prompt] = [CODE, *(prompt_of(n, seed=n) for n in (3, 120, 600))]
        asked = [
            (prompt, _shortened(params, *length_and_seed))
            for prompt, length_and_seed in zip(prompts, LENGTHS_AND_SEEDS, strict=True)
            for params in WAYS.values()
        ]
        gate = asyncio.Semaphore(self._in_flight)

        async def answered(prompt: Prompt, params: SamplingParams) -> Question:
            async with gate:
                completions = await client.generate(prompt, params).completions()
            return Question(prompt, params, [c.token_ids for c in completions])

        return await asyncio.gather(*(answered(*each) for each in asked))

    async def _ask_again(self, client: AsyncClient, questions: list[Question]) -> None:
        while not self._is_over:
            question = self._chance.choice(questions)
            self._report.num_requests += 1
            began = time.monotonic()
            try:
                await self._ask(client, question)
            except (UnavailableError, OverloadedError) as error:
                self._report.refused[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(0.2)
            except BatonError as error:
                lasted = time.monotonic() - began
                self._report.lost.append(
                    f"{type(error).__name__}: {error} (after {lasted:.0f} s; {question})"
                )

    async def _ask(self, client: AsyncClient, question: Question) -> None:
        async with client.generate(question.prompt, question.params) as generation:
            if self._chance.random() < SHARE_LEAVING:
                self._report.num_left += 1
                for _ in range(self._chance.randrange(20)):
                    await anext(generation, None)
                return
            completions = await generation.completions()
        assert generation.finished is not None
        self._report.num_migrations += generation.finished.usage.num_migrations
        self._report.num_resumed += generation.num_resumed
        if [c.token_ids for c in completions] != question.answer:
            self._report.wrong.append(str(question))

    # Faults.

    async def _break_again(self, fault: Callable[[], Awaitable[str]], mean_pause: float) -> None:
        """One fault after the other, until it is over; the last one is repaired too."""
        while not self._is_over:
            await asyncio.sleep(self._chance.uniform(0.0, 2.0 * mean_pause))
            if not self._is_over:
                self._report.faults[await fault()] += 1

    def _worker_fault(self, role: str) -> Callable[[], Awaitable[str]]:
        async def fault() -> str:
            victim = self._cluster.process(f"{role}-{self._chance.randrange(2)}")
            kind = self._chance.choice(["stopped", "killed", "drained"])
            faults = {
                "stopped": self._stop_for_a_while,
                "killed": self._kill_and_restart,
                "drained": self._drain_and_restart,
            }
            async with self._locks[victim.name]:
                await faults[kind](victim)
            return f"{role} {kind}"

        return fault

    async def _both_killed(self) -> str:
        role = self._chance.choice(["prefill", "decode"])
        victims = [self._cluster.process(f"{role}-{i}") for i in range(2)]
        async with AsyncExitStack() as stack:
            for victim in victims:
                await stack.enter_async_context(self._locks[victim.name])
            for victim in victims:
                victim.signal(signal.SIGKILL)
            await asyncio.gather(*(self._restart(victim) for victim in victims))
        return f"both {role} killed"

    async def _role_changed(self) -> str:
        """One worker joins the other pool for a while. It may be refused, or not be heard."""
        role, other = self._chance.choice([("prefill", "decode"), ("decode", "prefill")])
        worker = self._cluster.process(f"{role}-{self._chance.randrange(2)}")
        async with self._locks[worker.name]:
            changed = await self._is_changed(worker, other)
            if changed:
                await asyncio.sleep(self._chance.uniform(0.0, 5.0))
            async with asyncio.timeout(BACK_WITHIN):
                while not await self._is_changed(worker, role):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        return f"{role} in the other role" if changed else "role change refused"

    async def _is_changed(self, worker: Process, role: str) -> bool:
        try:
            async with AsyncClient(worker.admin_endpoint, timeout=10.0) as client:
                await client.set_role(worker.worker_id, role)
        except BatonError:
            return False
        return True

    async def _router_fault(self) -> str:
        await self._kill_and_restart(self._cluster.process("router"))
        return "router killed"

    async def _network_fault(self, network: Network) -> str:
        """Between a router and a worker, or two workers, for a while."""
        numbers = self._chance.randrange(2), self._chance.randrange(2)
        prefill, decode = f"prefill-{numbers[0]}", f"decode-{numbers[1]}"
        kind = self._chance.choice(["cut", "slow", "damage"])
        links = [("router", prefill), ("router", decode), (decode, prefill)]
        links += [("decode-0", "decode-1"), ("prefill-0", "prefill-1")]
        there, back = self._chance.choice(links)
        if self._chance.random() < 0.5 and "router" not in (there, back):
            there, back = back, there
        if kind == "damage":
            there, back = "decode-0", prefill  # to the other one they go by no network
        if kind == "cut":
            direction = self._chance.choice(["there", "back", "both"])
            with network.partition(there, back, direction):
                await asyncio.sleep(self._chance.uniform(0.2, 5.0))
            return f"network cut {'both ways' if direction == 'both' else 'one way'}"
        pipe = network.link(there, back).back
        try:
            if kind == "slow":
                pipe.delay = self._chance.uniform(0.01, 0.2)
                await asyncio.sleep(self._chance.uniform(0.2, 5.0))
                return "network slowed"
            num_before = pipe.num_damaged
            pipe.damage = once(self._chance.choice([corrupted, truncated, reordered, duplicated]))
            for _ in range(100):  # until blocks come by
                await asyncio.sleep(0.05)
                if pipe.num_damaged > num_before:
                    return "blocks damaged"
            return "no block to damage"
        finally:
            pipe.delay, pipe.damage = 0.0, None

    async def _redis_fault(self, network: Network) -> str:
        redis = self._cluster.redis
        assert redis is not None
        kind = self._chance.choice(["flush", "kill", "slow", "cut"])
        if kind in ("slow", "cut"):
            links = [network.link(p.name, REDIS) for p in self._cluster.processes]
            for link in links:
                link.back.delay, link.back.is_cut = 2.0 * (kind == "slow"), kind == "cut"
            await asyncio.sleep(self._chance.uniform(1.0, 5.0))
            for link in links:
                link.back.delay, link.back.is_cut = 0.0, False
            return "Redis slowed to 2 s" if kind == "slow" else "Redis cut off"
        if kind == "flush":
            client = connect(redis.url)
            await transact(client, ("FLUSHALL",))
            await client.aclose()
            return "Redis flushed"
        redis.stop()
        await asyncio.sleep(self._chance.uniform(0.0, 3.0))
        redis.start()
        return "Redis killed"

    async def _stop_for_a_while(self, victim: Process) -> None:
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(0.2, 5.0))
        victim.signal(signal.SIGCONT)
        await self._until_back(victim)

    async def _kill_and_restart(self, victim: Process) -> None:
        victim.signal(signal.SIGKILL)
        await self._restart(victim)

    async def _drain_and_restart(self, victim: Process) -> None:
        """Stops it as an operator would: what it runs migrates, or ends."""
        victim.signal(signal.SIGTERM)
        deadline = time.monotonic() + BACK_WITHIN
        assert await asyncio.to_thread(victim.wait, deadline), f"{victim.name} drains on"
        await self._restart(victim)

    async def _restart(self, victim: Process) -> None:
        await asyncio.sleep(self._chance.uniform(*AWAY))
        victim.start(victim.log_path.parent)
        await self._until_back(victim)

    async def _until_back(self, victim: Process) -> None:
        """Until the router gives it work. Fails after a while."""
        deadline = time.monotonic() + BACK_WITHIN
        while not await asyncio.to_thread(self._is_back, victim):
            assert time.monotonic() < deadline, f"{victim.name} stays away"
            await asyncio.sleep(0.2)

    def _is_back(self, victim: Process) -> bool:
        try:
            with Client(self._cluster.admin_address, timeout=2.0) as client:
                workers = {w.id: w.state for w in client.list_workers()}
        except BatonError:
            return False
        return victim.role == "router" or workers.get(victim.worker_id) == "ready"

    async def _sample_again(self, pause: float) -> None:
        while not self._is_over:
            self._report.samples.add(
                {p.name: p.pid for p in self._cluster.processes if p.is_running}
            )
            await asyncio.sleep(pause)

    async def _note_held(self) -> None:
        deadline = time.monotonic() + HELD_WITHIN
        while time.monotonic() < deadline:
            self._report.held = await asyncio.to_thread(held, self._cluster)
            if not self._report.held:
                return
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.cluster.soak", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--no-faults", action="store_true", help="steady load alone")
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT, help="requests at once")
    parser.add_argument("--charts", type=Path, help="SVG file for charts of the processes")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all that is chance")
    arguments = parser.parse_args()
    deferred_stream.check_installed()
    print(f"soak: {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    report = run(
        60.0 * arguments.minutes,
        arguments.seed,
        faults=not arguments.no_faults,
        in_flight=arguments.in_flight,
    )
    print(report)
    if arguments.charts:
        report.samples.write_charts(arguments.charts)
        print(f"charts of memory, descriptors and threads: {arguments.charts}")
    sys.exit(bool(report.lost or report.wrong or report.held))


if __name__ == "__main__":
    main()
