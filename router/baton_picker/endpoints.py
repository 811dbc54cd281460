"""Endpoints: the model servers that an endpoint picker knows, their load and their prefixes.

A picker learns of a model server's prefix cache by what it sent there, since other model servers
publish no KV events. Load is what it sent and saw end, and what the servers' own metrics add.
"""

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.cluster.events.kv_events import KvEvents
from baton.cluster.index import LocalityIndex
from baton.cluster.prefix import BlockHash
from baton.serving.listening import host_and_port
from baton_picker.addresses import Subset, host_port
from baton_picker.probe import Probe, Reading
from baton_router.routing.fleet.candidate import Candidate
from baton_router.routing.fleet.circuit_breaker import CircuitBreaker
from baton_router.routing.fleet.decayed_counter import coarse
from baton_router.routing.fleet.load import Load

logger = logging.getLogger(__name__)

AT_LIMIT = "at its limit of requests in flight"
"""Reason why a model server that answers cannot be chosen."""

_NUM_PROBES = 32  # at once
_FORGET_SECONDS = 600.0  # after which an endpoint that no request names any more is forgotten
_MAX_ENDPOINTS = 4096


class Endpoint:
    """Model server: its load, circuit breaker, latest reading and assumed prefix cache.

    Attributes:
        host: its IP address.
        is_listed: it is one of the configured endpoints, not one that a subset hint named.
        used_at: time of the latest request that named it, in seconds.
        num_unanswered: requests sent there whose answer has not begun.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, _ = host_port(address, "endpoint")
        self.is_listed = False
        self.used_at = time.monotonic()
        self.load = Load()
        self.circuit = CircuitBreaker()
        self.num_unanswered = 0
        self.num_waiting_elsewhere = 0.0  # queued requests that other clients sent
        self.kv_usage = 0.0
        self.blocks: OrderedDict[BlockHash, None] = OrderedDict()  # oldest first

    def apply(self, reading: Reading) -> None:
        """Takes over what its metrics say; what they do not say is no load."""
        self.num_waiting_elsewhere = max(0.0, (reading.num_waiting or 0.0) - self.num_unanswered)
        self.kv_usage = min(1.0, reading.kv_usage or 0.0)


class Endpoints:
    """All known endpoints, probed from `start` to `stop`.

    Args:
        names: configured HOST:PORT; empty: requests name their endpoints.
        capacity: tokens whose KV each endpoint is assumed to hold.
    """

    def __init__(
        self,
        names: Collection[str],
        probe: Probe,
        interval: float,
        index: LocalityIndex,
        *,
        block_size: int,
        capacity: int,
        max_in_flight: int | None,
    ) -> None:
        self.index = index
        self._names = [host_port(name, "picker_endpoints") for name in names]
        self._probe = probe
        self._interval = interval
        self._block_size = block_size
        self._max_blocks = -(-capacity // block_size)
        self._capacity = capacity
        self._max_in_flight = max_in_flight
        self._known: dict[str, Endpoint] = {}
        self._resolved: dict[tuple[str, int], frozenset[str]] = {}
        self._threads = ThreadPoolExecutor(_NUM_PROBES, thread_name_prefix="probe")
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Resolves and probes all configured endpoints once, then goes on in the background."""
        await self._round()
        self._loop_task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        tasks = [*self._probing.values(), *([self._loop_task] if self._loop_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def all(self) -> list[Endpoint]:
        """All known endpoints, sorted by address."""
        return [self._known[address] for address in sorted(self._known)]

    def get(self, address: str) -> Endpoint | None:
        return self._known.get(address)

    def eligible(self, subset: Subset | None) -> list[Endpoint]:
        """Returns the endpoints that a request may go to: the configured ones, or those of them in
        `subset`; all of `subset` if none is configured, and of a host in it those that are
        known."""
        if self._names:
            listed = (one for one in self.all if one.is_listed)
            return [one for one in listed if subset is None or subset.has(one.address, one.host)]
        now, given = time.monotonic(), subset or Subset()
        found = [self._add(address) for address in sorted(given.addresses)]
        if given.hosts:
            others = (one for one in self.all if one.address not in given.addresses)
            found += [one for one in others if one.host in given.hosts]
        for endpoint in found:
            endpoint.used_at = now
        return found

    def candidates(
        self, eligible: Iterable[Endpoint], hashes: Sequence[BlockHash], mean_tokens: float
    ) -> tuple[Candidate, ...]:
        """Returns a snapshot of these endpoints, with the prompt tokens each has cached.

        `mean_tokens`: tokens of a prompt that another client has queued there.
        """
        cached = self.index.match(hashes)
        now = coarse(time.monotonic())
        return tuple(
            self._candidate(one, cached.get(one.address, 0), now, mean_tokens) for one in eligible
        )

    def note_prefix(self, endpoint: Endpoint, hashes: Sequence[BlockHash]) -> None:
        """Assumes that an endpoint has cached these blocks, and has evicted the oldest beyond its
        capacity for them, ends of prompts first."""
        for block in reversed(hashes):
            endpoint.blocks[block] = None
            endpoint.blocks.move_to_end(block)
        num_evicted = max(0, len(endpoint.blocks) - self._max_blocks)
        evicted = tuple(endpoint.blocks.popitem(last=False)[0] for _ in range(num_evicted))
        stored = tuple(hashes) if not evicted else tuple(h for h in hashes if h in endpoint.blocks)
        self.index.apply(endpoint.address, 0, KvEvents(stored=stored, removed=evicted))

    def report_failure(self, endpoint: Endpoint) -> None:
        """Counts a failed request, and probes the endpoint now: one that is gone gets no more."""
        endpoint.circuit.record_failure()
        self._start_probe(endpoint)

    def _candidate(
        self, endpoint: Endpoint, num_blocks: int, now: float, mean_tokens: float
    ) -> Candidate:
        candidate = endpoint.load.candidate(
            endpoint.address,
            "decode",  # it computes prompts and answers alone
            b"",
            now,
            num_cached_tokens=num_blocks * self._block_size,
            max_held_tokens=self._capacity,
            excluded=self._excluded(endpoint),
        )
        others = endpoint.num_waiting_elsewhere
        return candidate._replace(
            num_queued_tokens=candidate.num_queued_tokens + round(others * mean_tokens),
            num_sequences=candidate.num_sequences + round(others),
            num_held_tokens=max(
                candidate.num_held_tokens, round(endpoint.kv_usage * self._capacity)
            ),
        )

    def _excluded(self, endpoint: Endpoint) -> str:
        if not endpoint.circuit.is_closed:
            return "not answering"
        limit = self._max_in_flight
        return AT_LIMIT if limit is not None and endpoint.load.num_sequences >= limit else ""

    def _add(self, address: str) -> Endpoint:
        if address not in self._known:
            if len(self._known) >= _MAX_ENDPOINTS:
                self._forget(min(self._known.values(), key=lambda one: one.used_at))
            self._known[address] = Endpoint(address)
        return self._known[address]

    def _forget(self, endpoint: Endpoint) -> None:
        self.index.drop(endpoint.address)
        del self._known[endpoint.address]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._round()
            except Exception:
                logger.exception("a round of probes failed; the next one follows")

    async def _round(self) -> None:
        """Resolves names, forgets endpoints that are gone, and probes all others."""
        await asyncio.gather(*(self._resolve(host, port) for host, port in self._names))
        listed = frozenset[str]().union(*self._resolved.values())
        for address in listed:
            self._add(address).is_listed = True
        unused_since = time.monotonic() - _FORGET_SECONDS
        for endpoint in self.all:
            if endpoint.address not in listed:
                endpoint.is_listed = False
                if self._names or endpoint.used_at < unused_since:
                    self._forget(endpoint)
        for endpoint in self.all:
            self._start_probe(endpoint)
        await asyncio.gather(*self._probing.values())

    async def _resolve(self, host: str, port: int) -> None:
        """Asks DNS for a name. Keeps the former addresses if it does not answer."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if self._resolved.get((host, port)) is None:
                logger.warning("cannot resolve %s: %s", host, error)
            self._resolved.setdefault((host, port), frozenset())
            return
        self._resolved[host, port] = frozenset(
            host_and_port(str(sockaddr[0]), port) for *_, sockaddr in found
        )

    def _start_probe(self, endpoint: Endpoint) -> None:
        address = endpoint.address
        if address not in self._probing:
            task = self._probing[address] = asyncio.create_task(self._probe_one(endpoint))
            task.add_done_callback(lambda _: self._probing.pop(address, None))

    async def _probe_one(self, endpoint: Endpoint) -> None:
        host, port = host_port(endpoint.address, "endpoint")
        loop = asyncio.get_running_loop()
        try:
            reading = await loop.run_in_executor(self._threads, self._probe.read, host, port)
        except OSError as error:
            if endpoint.circuit.is_closed:
                logger.info("%s does not answer: %s", endpoint.address, error)
                endpoint.circuit.trip()
                # The server that comes back there has computed none of it.
                endpoint.blocks.clear()
                self.index.drop(endpoint.address)
            return
        except RuntimeError:  # the threads are stopped
            return
        if not endpoint.circuit.is_closed and endpoint.circuit.seconds_to_probe == 0:
            logger.info("%s answers again", endpoint.address)
            endpoint.circuit.probe_succeeded()
        endpoint.apply(reading)
