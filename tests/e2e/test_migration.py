"""Workers that die or fall silent at any moment of a request: its stream goes on with others, token
for token as if nothing had happened."""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import psutil
import pytest

from baton.cli.local.local_cluster import LocalCluster
from baton.client.client import AsyncClient, Chunk
from baton.client.generation import AsyncGeneration
from baton.client.types import FinishReason, Placement
from baton.errors import InternalError
from baton.sampling import SamplingParams
from baton_router.lifecycle.recovery import SAME_PLACE_TOKENS
from tests.support.cluster.checkpoints import prompt_of
from tests.support.cluster.sampling_modes import CODE, SEEDED, THREE_WAYS, answer_of, check_same
from tests.support.cluster.scraped import scrape
from tests.support.cluster.slowness import slowed
from tests.support.cluster.watch import load_of, until_nothing_is_held
from tests.support.cluster.wide import DECODE_WORKERS, listed, name_of, restored
from tests.support.waiting import until_none_is_left, until_observed

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

PLAIN = SamplingParams(max_tokens=300, ignore_eos=True)
# A loss is noticed within the silence bound; the request is placed and computed again.
GOES_ON_WITHIN = 3.0


@pytest.fixture
async def client(pair: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pair.address) as open_client:
        yield open_client


@dataclass
class Told:
    """Messages to a client about one request."""

    placement: Placement
    chunks: list[Chunk] = field(default_factory=list)
    longest_gap: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [token_id for chunk in self.chunks for token_id in chunk.token_ids]

    def check_positions(self) -> None:
        """No token is told twice or left out."""
        at: dict[int, int] = {}
        for chunk in self.chunks:
            if chunk.token_ids:
                assert chunk.position == at.get(chunk.sequence_index, 0)
                at[chunk.sequence_index] = chunk.position + len(chunk.token_ids)


Disturbance = Callable[[Told], Awaitable[None]]


async def told(generation: AsyncGeneration, at: int, disturb: Disturbance) -> Told:
    """Reads a generation to its end; after `at` tokens something happens."""
    seen = Told((await generation.wait_accepted()).placement)
    is_due, last = True, time.monotonic()
    while True:
        if is_due and len(seen.token_ids) >= at:
            is_due = False
            await disturb(seen)
        try:
            seen.chunks.append(await anext(generation))
        except StopAsyncIteration:
            break
        seen.longest_gap = max(seen.longest_gap, time.monotonic() - last)
        last = time.monotonic()
    seen.check_positions()
    return seen


def killer(cluster: LocalCluster, role: str) -> Disturbance:
    async def kill(seen: Told) -> None:
        cluster.kill(name_of(cluster, getattr(seen.placement, f"{role}_worker")))

    return kill


# One request, at each of its moments.


@pytest.mark.parametrize(
    ("at", "num_migrations"),
    [
        pytest.param(1, 1, id="after the first token"),
        pytest.param(150, 1, id="in the middle", marks=pytest.mark.nightly),
        pytest.param(299, None, id="at the last token", marks=pytest.mark.slow),
    ],
)
async def test_request_survives_a_killed_decode_worker(client, pair, at, num_migrations):
    prompt = prompt_of(70, seed=at)
    undisturbed = await client.generate(prompt, PLAIN).token_ids()
    with slowed(pair, *DECODE_WORKERS):
        generation = client.generate(prompt, PLAIN)
        seen = await told(generation, at, killer(pair, "decode"))
    assert seen.token_ids == undisturbed
    assert seen.longest_gap < GOES_ON_WITHIN
    assert generation.finished.reason is FinishReason.LENGTH
    usage = generation.finished.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens) == (70, 300)
    # Of the very last tokens some may have been on their way.
    assert usage.num_migrations == num_migrations or num_migrations is None
    await until_nothing_is_held(pair)


def tokens_computed(cluster: LocalCluster, name: str) -> tuple[float, float]:
    """By a worker since it started: those of decodes, and those that it was behind by."""
    family = scrape(cluster.metrics_endpoints[name])["baton_step_tokens_total"]
    decode, prompt = (
        family.total("baton_step_tokens_total", kind=kind) for kind in ("decode", "prompt")
    )
    return decode, prompt


async def ending_early(client: AsyncClient, params: SamplingParams) -> SamplingParams:
    """The same with a stop string that ends one of its sequences early, and no other."""
    texts = [c.text for c in await client.generate(CODE, params).completions()]
    parts = [text[at : at + 6] for text in texts for at in range(20, 60)]
    stop = next(part for part in parts if sum(part in text for text in texts) == 1)
    return replace(params, stop=(stop,))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="seeded"),
        pytest.param(
            {"repetition_penalty": 1.2, "logprobs": True, "top_logprobs": 2},
            id="penalties",
            marks=pytest.mark.nightly,
        ),
    ],
)
async def test_sequences_resume_at_their_positions_on_another_worker(client, pair, changes):
    """One has ended by then; of the others the second worker chooses what is missing, and no
    token that was there."""
    params = await ending_early(client, replace(SEEDED, n=4, **changes))
    undisturbed = await answer_of(client.generate(CODE, params))
    before: dict[str, tuple[float, float]] = {}

    async def kill(seen: Told) -> None:
        before.update({name: tokens_computed(pair, name) for name in ("decode-0", "decode-1")})
        await killer(pair, "decode")(seen)

    at = sum(len(completion.token_ids) for completion in undisturbed[0]) // 2
    with slowed(pair, *DECODE_WORKERS):
        generation = client.generate(CODE, params)
        seen = await told(generation, at, kill)
    assert generation.finished.usage.num_migrations == 1
    check_same("several", await answer_of(generation), undisturbed)
    (second,) = (p.name for p in pair.processes if p.role == "decode" and p.is_running)
    num_chosen, num_replayed = (
        now - then for now, then in zip(tokens_computed(pair, second), before[second], strict=True)
    )
    assert 0 < num_chosen <= len(seen.token_ids) - at
    assert num_replayed > 0
    await until_nothing_is_held(pair)


async def computed(
    client: AsyncClient, cluster: LocalCluster, prompt: list[int]
) -> AsyncGeneration:
    """A generation whose long prompt a prefill worker is computing."""
    generation = client.generate(prompt, replace(PLAIN, max_tokens=20))
    name = name_of(cluster, (await generation.wait_accepted()).placement.prefill_worker)
    endpoint = cluster.process(name).admin_endpoint
    await until_observed(lambda: load_of(endpoint).num_running == 1, within=2.0, what="the prefill")
    return generation


@pytest.mark.parametrize(
    ("role", "signum"),
    [
        pytest.param("prefill", signal.SIGSTOP, id="prefill stopped"),
        pytest.param("prefill", signal.SIGKILL, id="prefill killed"),
        pytest.param("decode", signal.SIGSTOP, id="decode stopped", marks=pytest.mark.nightly),
        pytest.param("decode", signal.SIGKILL, id="decode killed", marks=pytest.mark.nightly),
    ],
)
async def test_request_survives_loss_of_a_worker_during_prefill(client, pair, role, signum):
    prompt = prompt_of(1900, seed=10 * len(role) + signum)  # one that no worker has cached
    with slowed(pair, "prefill-0", "prefill-1"):
        generation = await computed(client, pair, prompt)
    seen = Told((await generation.wait_accepted()).placement)
    lost = name_of(pair, getattr(seen.placement, f"{role}_worker"))
    pair.kill(lost, signum)
    tokens = await generation.token_ids()
    assert generation.finished.usage.num_migrations >= 1
    pair.kill(lost, signal.SIGCONT)
    undisturbed = client.generate(prompt, replace(PLAIN, max_tokens=20))
    assert tokens == await undisturbed.token_ids()
    await until_nothing_is_held(pair, within=3.0)


@pytest.mark.slow
async def test_prefill_worker_may_die_once_its_blocks_are_transferred(client, pair):
    prompt = prompt_of(50, seed=5)
    undisturbed = await client.generate(prompt, PLAIN).token_ids()
    generation = client.generate(prompt, PLAIN)
    seen = await told(generation, 30, killer(pair, "prefill"))
    assert seen.token_ids == undisturbed
    assert generation.finished.usage.num_migrations == 0
    await until_nothing_is_held(pair)


@pytest.mark.slow
async def test_silent_decode_worker_is_replaced_and_recovers(client, pair):
    """Late answers of the worker reach no client, and it takes work again."""
    long = replace(PLAIN, max_tokens=1000)
    prompt = prompt_of(60, seed=6)
    undisturbed = await client.generate(prompt, long).token_ids()
    generation = client.generate(prompt, long)
    silent = name_of(pair, (await generation.wait_accepted()).placement.decode_worker)
    waking: list[asyncio.Task[None]] = []

    async def fall_silent(_: Told) -> None:
        pair.kill(silent, signal.SIGSTOP)
        waking.append(asyncio.create_task(wake_up()))

    async def wake_up() -> None:
        """While the other worker goes on with it."""
        await asyncio.sleep(2.5)
        pair.kill(silent, signal.SIGCONT)

    seen = await told(generation, 100, fall_silent)
    await asyncio.gather(*waking)
    assert seen.token_ids == undisturbed
    assert seen.longest_gap < GOES_ON_WITHIN
    assert generation.finished.usage.num_migrations == 1
    await until_nothing_is_held(pair, within=3.0)
    pair.wait_ready(5.0)


@pytest.mark.slow
async def test_drain_timeout_recomputes_requests_that_cannot_migrate(client, pair):
    """Several sequences are not handed over; another worker computes what they have come to."""
    # No draw is nearer than 1e-5 to the border of two tokens: which of them it is may depend on the
    # rounding of KV that was computed in other chunks, by up to 1e-6.
    several = replace(PLAIN, max_tokens=1500, n=2, temperature=0.5, seed=8)
    prompt = prompt_of(40, seed=12)
    generation = client.generate(prompt, several)

    async def end(seen: Told) -> None:
        pair.process(name_of(pair, seen.placement.decode_worker)).signal(signal.SIGTERM)

    await told(generation, 20, end)
    assert generation.finished.usage.num_migrations >= 1
    await until_nothing_is_held(pair)
    answers = [
        [completion.token_ids for completion in await each.completions()]
        for each in (generation, client.generate(prompt, several))
    ]
    assert answers[0] == answers[1]


def stopped_tree(pid: int) -> list[psutil.Process]:
    """A worker's process, and its engine's, which are stopped."""
    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    for each in tree:
        each.suspend()
    return tree


def let_run(tree: list[psutil.Process], seconds: float) -> None:
    for each in tree:
        each.resume()
    time.sleep(seconds)
    for each in tree:
        each.suspend()


async def strike_twice(
    client: AsyncClient, cluster: LocalCluster, signum: int, seed: int
) -> tuple[AsyncGeneration, "asyncio.Task[list[int]]"]:
    """A generation whose two decode workers are sent a signal at nearly one place of it, and the
    task that reads it."""
    for _ in range(10):
        generation = client.generate(prompt_of(30, seed=seed), replace(PLAIN, max_tokens=1900))
        first = name_of(cluster, (await generation.wait_accepted()).placement.decode_worker)
        token_ids: list[int] = []
        reading = asyncio.create_task(read(generation, token_ids))
        if await strike(cluster, first, token_ids, signum):
            return generation, reading
        # A busy machine has let the second one compute too much.
        reading.cancel()
        restored(cluster)
    raise AssertionError("the second worker never stood at the place of the first")


async def read(generation: AsyncGeneration, token_ids: list[int]) -> list[int]:
    async for chunk in generation:
        token_ids.extend(chunk.token_ids)
    return token_ids


async def strike(cluster: LocalCluster, first: str, token_ids: list[int], signum: int) -> bool:
    """Whether both stood at nearly one place of what a client has read, when the signals came."""
    second = "decode-1" if first == "decode-0" else "decode-0"
    await until_observed(lambda: len(token_ids) >= 20, what="the first tokens")
    # A small model computes several tokens a millisecond, and eight are another place.
    tree = stopped_tree(cluster.process(second).pid)
    cluster.kill(first, signum)
    await asyncio.sleep(0.2)  # what the first one has sent comes meanwhile
    shown_by_first = len(token_ids)
    # One of them may be the prefill worker's, before the second one has anything to compute.
    for _ in range(1000):
        let_run(tree, 0.0005)
        await asyncio.sleep(0.01)
        if len(token_ids) >= shown_by_first + 3:
            break
    is_near = len(token_ids) < shown_by_first + SAME_PLACE_TOKENS
    if is_near:
        cluster.kill(second, signum)
    for each in tree[1:] if is_near else tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.resume()
    return is_near


@pytest.mark.slow
async def test_request_that_kills_two_decode_workers_is_poisoned(client, pair):
    _, reading = await strike_twice(client, pair, signal.SIGKILL, seed=14)
    with pytest.raises(InternalError, match="poison"):
        await reading
    prefills = [p.admin_endpoint for p in pair.processes if p.role == "prefill"]
    await until_observed(lambda: not any(load_of(e).num_held_blocks for e in prefills), within=1.0)


@pytest.mark.nightly
async def test_request_survives_silence_of_two_decode_workers(client, pair):
    generation, reading = await strike_twice(client, pair, signal.SIGSTOP, seed=15)
    await until_observed(
        lambda: {listed(pair)[f"decode-{i}"].state for i in range(2)} == {"unreachable"},
        within=4.0,
        what="their silence",
    )
    for name in ("decode-0", "decode-1"):
        pair.kill(name, signal.SIGCONT)
    tokens = await reading
    pair.wait_ready(5.0)
    undisturbed = client.generate(prompt_of(30, seed=15), replace(PLAIN, max_tokens=1900))
    assert tokens == await undisturbed.token_ids()
    assert generation.finished.usage.num_migrations >= 2
    await until_nothing_is_held(pair, within=3.0)


@pytest.mark.slow
async def test_router_closes_connections_to_dead_workers(client, pair):
    undisturbed = await client.generate(prompt_of(30, seed=13), PLAIN).token_ids()
    router = psutil.Process(pair.process("router").pid)
    # More may be opened to Redis at any time, and stay for the next round trips at once.
    redis_port = urlsplit(pair.redis_url).port

    def in_excess() -> list[str]:
        """Connections whose other end has closed, and those to one worker beside the first.

        Not all that there are: a restarted worker may have its connection now or later.
        """
        found = router.net_connections()
        # Clients' own ports may be equal: one connects to two of the router's from the same.
        served = {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}
        remote = [
            c
            for c in found
            if c.raddr and c.raddr.port != redis_port and c.laddr.port not in served
        ]
        counts = Counter(c.raddr.port for c in remote)
        return [
            f"{c.laddr.port} to {c.raddr.port} ({c.status})"
            for c in remote
            if c.status == psutil.CONN_CLOSE_WAIT or counts[c.raddr.port] > 1
        ]

    generation = client.generate(prompt_of(30, seed=13), PLAIN)
    seen = await told(generation, 10, killer(pair, "decode"))
    assert seen.token_ids == undisturbed
    restored(pair)
    await until_nothing_is_held(pair)
    await until_none_is_left(in_excess, within=30.0, what="connections")


@pytest.mark.slow
async def test_requests_of_every_kind_survive_their_decode_worker(client, pair):
    """All ten do in tests/worker/test_sampling_modes.py."""
    undisturbed = {n: await answer_of(client.generate(CODE, p)) for n, p in THREE_WAYS.items()}
    with slowed(pair, *DECODE_WORKERS):
        running = {name: client.generate(CODE, params) for name, params in THREE_WAYS.items()}
        for generation in running.values():
            await anext(generation)
        accepted = await running["several"].wait_accepted()
        pair.kill(name_of(pair, accepted.placement.decode_worker))
    answers = await asyncio.gather(*(answer_of(generation) for generation in running.values()))
    assert running["several"].finished.usage.num_migrations == 1
    for name, answer in zip(running, answers, strict=True):
        check_same(name, answer, undisturbed[name])
    await until_nothing_is_held(pair)
