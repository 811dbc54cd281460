"""Prometheus metrics of a router, collected on scrape from counters that exist anyway."""

from collections import Counter
from collections.abc import Collection, Iterable

from prometheus_client.core import Metric

from baton.cluster.round_trips import RoundTrips
from baton.serving.server import Server
from baton.serving.telemetry.families import counter, gauge, histogram
from baton.serving.telemetry.redis import redis_metrics
from baton_router.admission.controller import AdmissionController
from baton_router.admission.quotas import OTHERS
from baton_router.admission.rate_limit import KINDS, RateLimits
from baton_router.admission.readiness import Readiness
from baton_router.failure import FailureKind
from baton_router.fleet.fleet import Fleet
from baton_router.lifecycle.in_flight import Requests
from baton_router.placement.placer import PLACED, Placer
from baton_router.roles.rebalancer import Rebalancer
from baton_router.telemetry.request_meter import RequestMeter

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class RouterMetrics:
    """Prometheus collector of the router (`baton.serving.telemetry.exposition`)."""

    def __init__(
        self,
        meter: RequestMeter,
        requests: Requests,
        admission_controller: AdmissionController,
        readiness: Readiness,
        placer: Placer,
        fleet: Fleet,
        rebalancer: Rebalancer,
        round_trips: RoundTrips,
    ) -> None:
        self._meter = meter
        self._requests_in_flight = requests
        self._admission = admission_controller
        self._readiness = readiness
        self._placer = placer
        self._fleet = fleet
        self._rebalancer = rebalancer
        self._round_trips = round_trips

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._placements()
        yield from self._workers()
        yield from redis_metrics(self._round_trips, self._fleet.staleness)

    def _requests(self) -> Iterable[Metric]:
        meter, admission_controller = self._meter, self._admission
        yield histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to first token (TTFT), from the request's arrival.",
            meter.ttft.by_labels,
            _GEN_AI,
        )
        yield histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token after the first (TPOT), as the mean of each request.",
            meter.per_token.by_labels,
            _GEN_AI,
        )
        yield histogram(
            "gen_ai_server_request_duration_seconds",
            "Request duration from arrival to end; error_type is its gRPC code if it failed.",
            meter.duration.by_labels,
            (*_GEN_AI, "error_type"),
        )
        yield histogram(
            "baton_admission_seconds",
            "Admission latency, from a request's arrival until its workers have admitted it.",
            meter.admission,
        )
        yield histogram(
            "baton_prefill_queue_seconds",
            "Queueing time of a prompt at its worker, until the first step of its prefill.",
            meter.prefill_queue,
        )
        yield gauge(
            "baton_requests_in_flight",
            "Requests in flight at this router.",
            len(self._requests_in_flight),
        )
        yield gauge(
            "baton_requests_waiting",
            "Requests in this router's admission queue.",
            admission_controller.num_waiting,
        )
        yield gauge(
            "baton_requests_waiting_for_workers",
            "Requests that wait for the first workers of a router that has just started.",
            self._readiness.num_waiting,
        )
        yield gauge(
            "baton_admission_paused",
            "Whether admission at this router is paused (baton pause).",
            admission_controller.is_paused,
        )
        yield gauge(
            "baton_waiting_prompt_tokens",
            "Prompt tokens of the requests in this router's admission queue.",
            admission_controller.num_waiting_tokens,
        )
        yield counter(
            "baton_prompt_tokens_total",
            "Prompt tokens of requests that have ended.",
            meter.num_prompt_tokens,
        )
        yield counter(
            "baton_output_tokens_total",
            "Output tokens of requests that have ended.",
            meter.num_output_tokens,
        )

    def _placements(self) -> Iterable[Metric]:
        yield counter(
            "baton_placements_total",
            "Placement decisions: handoff from a prefill to a decode worker, decode worker alone, "
            "or no worker available.",
            {(way,): self._placer.num_placed[way] for way in PLACED},
            ("way",),
        )
        yield counter(
            "baton_unrecorded_placements_total",
            "Entries dropped from the record of placements, where the disk is full or slow.",
            self._placer.num_unrecorded,
        )
        yield counter(
            "baton_setbacks_total",
            "Failed attempts of requests that have ended: refused by a worker, worker lost or "
            "silent, handoff broken, no worker available, preempted by its worker.",
            {(k.name.lower(),): self._meter.num_failures[k] for k in FailureKind},
            ("kind",),
        )
        yield counter(
            "baton_migrations_total",
            "Migrations to other workers, of requests that have ended.",
            self._meter.num_migrations,
        )

    def _workers(self) -> Iterable[Metric]:
        fleet, balance = self._fleet, self._rebalancer.balance
        known = Counter[tuple[str, str]]((m.record.role, m.state) for m in fleet.members)
        states = ("ready", "draining", "unreachable", "starting")
        yield gauge(
            "baton_workers",
            "Workers known to this router.",
            {(r, s): known[r, s] for r in ("prefill", "decode") for s in states},
            ("role", "state"),
        )
        yield gauge(
            "baton_pool_pressure",
            "Load of a pool by its capacity, as `baton role` shows it; above 1: overloaded.",
            {("prefill",): balance.prefill_pressure, ("decode",): balance.decode_pressure},
            ("role",),
        )
        yield gauge(
            "baton_indexed_blocks",
            "Cached KV blocks in this router's locality index, counted once per worker.",
            sum(fleet.index.num_blocks(m.record.id) for m in fleet.members),
        )
        yield gauge(
            "baton_index_is_warm",
            "Whether this router's locality index has all KV events that its workers published.",
            fleet.is_warm,
        )


class RateLimitMetrics:
    """Rate limit metrics: rejections by tenant and limit, and connections that `server` dropped. A
    tenant has its own label if it is `named` in the file of quotas, which bounds the number of
    labels; the others share "*"."""

    def __init__(self, limits: RateLimits, named: Collection[str], server: Server) -> None:
        self._limits = limits
        self._named = named
        self._server = server

    def collect(self) -> Iterable[Metric]:
        tenants = (*self._named, OTHERS)
        refused: dict[tuple[str, ...], float] = {(t, kind): 0 for t in tenants for kind in KINDS}
        for (tenant, kind), number in self._limits.num_refused.items():
            refused[tenant if tenant in self._named else OTHERS, kind] += number
        yield counter(
            "baton_rate_limited_total",
            "Requests rejected by a tenant's rate limit of requests, tokens or bytes per minute.",
            refused,
            ("tenant", "limit"),
        )
        yield counter(
            "baton_dropped_connections_total",
            "gRPC connections of clients dropped since they opened, or opened and reset, too many "
            "calls a second.",
            self._server.num_dropped_connections,
        )
