"""Metrics of a router's requests, fleets and placement."""

from collections import Counter
from collections.abc import Iterable
from itertools import product

from prometheus_client.core import Metric

from baton.cluster.redis.round_trips import RoundTrips
from baton.rpc.worker_role import ROLES
from baton.serving.telemetry.families import Labels, counter, gauge, histogram
from baton.serving.telemetry.redis import redis_metrics
from baton_router.call.failure import FailureKind
from baton_router.call.usage import ENCODED_BY
from baton_router.lifecycle.in_flight import Requests
from baton_router.routing.fleet.fleet import Fleet
from baton_router.routing.fleet.fleets import Fleets
from baton_router.routing.placement.placer import PATHS
from baton_router.served.served_models import Models

_MODEL = ("model",)
_TENANT = ("tenant",)
_WORKER = ("model", "role", "worker")
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class RouterMetrics:
    """Prometheus collector of the router (`baton.serving.telemetry.exposition`)."""

    def __init__(
        self,
        models: Models,
        fleets: Fleets,
        requests: Requests,
        round_trips: RoundTrips,
    ) -> None:
        self._models = models
        self._services = [served.services for served in models]
        self._fleets = fleets
        self._requests_in_flight = requests
        self._round_trips = round_trips

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._queues()
        yield from self._placements()
        yield from self._workers()
        yield from redis_metrics(self._round_trips, self._fleets.staleness)

    def _requests(self) -> Iterable[Metric]:
        meters = [one.meter for one in self._services]
        yield histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time to first token (TTFT), from the request's arrival.",
            {labels: one for meter in meters for labels, one in meter.ttft.by_labels.items()},
            _GEN_AI,
        )
        yield histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time per output token after the first (TPOT), as the mean of each request.",
            {labels: one for meter in meters for labels, one in meter.per_token.by_labels.items()},
            _GEN_AI,
        )
        yield histogram(
            "gen_ai_server_request_duration_seconds",
            "Request duration from arrival to end; error_type is its gRPC code if it failed.",
            {labels: one for meter in meters for labels, one in meter.duration.by_labels.items()},
            (*_GEN_AI, "error_type"),
        )
        yield histogram(
            "baton_admission_seconds",
            "Admission latency, from a request's arrival until its workers have admitted it.",
            {(one.card.name,): one.meter.admission for one in self._services},
            _MODEL,
        )
        yield histogram(
            "baton_prefill_queue_seconds",
            "Queueing time of a prompt at its worker, until the first step of its prefill.",
            {(one.card.name,): one.meter.prefill_queue for one in self._services},
            _MODEL,
        )
        yield histogram(
            "baton_encode_seconds",
            "Time from the call of another worker until it has encoded an input, with its queue.",
            {(one.card.name,): one.meter.encode for one in self._services},
            _MODEL,
        )
        yield counter(
            "baton_prompt_tokens_total",
            "Prompt tokens of requests that have ended.",
            {(one.card.name,): one.meter.num_prompt_tokens for one in self._services},
            _MODEL,
        )
        yield counter(
            "baton_output_tokens_total",
            "Output tokens of requests that have ended.",
            {(one.card.name,): one.meter.num_output_tokens for one in self._services},
            _MODEL,
        )
        caches = {(one.card.name,): one.intake.images.cache for one in self._services}
        yield counter(
            "baton_image_cache_hits_total",
            "Files of images and clips that were preprocessed already for an earlier request.",
            {labels: cache.num_hits if cache else 0 for labels, cache in caches.items()},
            _MODEL,
        )
        yield counter(
            "baton_image_cache_misses_total",
            "Files of images and clips that were decoded and preprocessed.",
            {labels: cache.num_misses if cache else 0 for labels, cache in caches.items()},
            _MODEL,
        )
        yield counter(
            "baton_models_not_found_total",
            "Requests for a model that this router does not serve.",
            self._models.num_not_found,
        )

    def _queues(self) -> Iterable[Metric]:
        requests = self._requests_in_flight
        yield gauge(
            "baton_requests_in_flight",
            "Requests in flight at this router.",
            {(served.name,): requests.num_of(served.name) for served in self._models},
            _MODEL,
        )
        yield gauge(
            "baton_requests_waiting",
            "Requests in this router's admission queue.",
            {(one.card.name,): one.admission_controller.num_waiting for one in self._services},
            _MODEL,
        )
        yield gauge(
            "baton_requests_waiting_for_workers",
            "Requests that wait for the first workers of a router that has just started.",
            {(one.card.name,): one.readiness.num_waiting for one in self._services},
            _MODEL,
        )
        yield gauge(
            "baton_admission_paused",
            "Whether admission at this router is paused (baton pause).",
            requests.is_paused,
        )
        yield gauge(
            "baton_waiting_prompt_tokens",
            "Prompt tokens of the requests in this router's admission queue.",
            {
                (one.card.name,): one.admission_controller.num_waiting_tokens
                for one in self._services
            },
            _MODEL,
        )

    def _placements(self) -> Iterable[Metric]:
        yield counter(
            "baton_placements_total",
            "Placement decisions: handoff from a prefill to a decode worker, decode worker alone, "
            "prefill worker alone for a pooled output, or no worker available.",
            {
                (one.card.name, path): one.placer.num_placed[path]
                for one in self._services
                for path in PATHS
            },
            ("model", "path"),
        )
        yield counter(
            "baton_unrecorded_placements_total",
            "Entries dropped from the record of placements, where the disk is full or slow.",
            # All models share one record.
            max((one.placer.num_unrecorded for one in self._services), default=0),
        )
        yield counter(
            "baton_attempt_failures_total",
            "Failed attempts of requests that have ended: refused by a worker, worker lost or "
            "silent, handoff broken, no worker available, preempted by its worker, worker too "
            "small, worker that sent what none may send (violation).",
            {
                (one.card.name, kind.name.lower()): one.meter.num_failures[kind]
                for one in self._services
                for kind in FailureKind
            },
            ("model", "kind"),
        )
        yield counter(
            "baton_encoder_inputs_total",
            "Encoder inputs of requests that have ended, by where they were encoded: by the worker "
            "that computes the prompt (local), by another one for the request (encode) or before "
            "(cached_remote), or by the first after the other had failed (failed).",
            {
                (one.card.name, source): one.meter.num_encoder_inputs[source]
                for one in self._services
                for source in ENCODED_BY
            },
            ("model", "source"),
        )
        yield counter(
            "baton_migrations_total",
            "Migrations to other workers, of requests that have ended.",
            {(one.card.name,): one.meter.num_migrations for one in self._services},
            _MODEL,
        )

    def _workers(self) -> Iterable[Metric]:
        members = self._fleets.members
        known = Counter[Labels]((model, m.record.role, m.state) for model, m in members)
        states = ("ready", "draining", "unreachable", "starting")
        yield gauge(
            "baton_workers",
            "Workers known to this router.",
            {
                labels: known[labels]
                for served in self._models
                for labels in product((served.name,), ROLES, states)
            },
            ("model", "role", "state"),
        )
        yield gauge(
            "baton_worker_step_seconds",
            "Mean time of a worker's recent engine steps, as it reports to this router.",
            {
                (model, m.record.role, m.record.id): m.model.step_seconds
                for model, m in members
                if m.model.step_seconds
            },
            _WORKER,
        )
        yield gauge(
            "baton_worker_slowness",
            "Factor by which a worker's recent steps took longer than its peers take for the same "
            "work, by the router's fitted costs; 1: no longer, or the difference may be noise.",
            {
                (model, m.record.role, m.record.id): m.model.slowness
                for model, m in members
                if m.model.step_seconds
            },
            _WORKER,
        )
        yield gauge(
            "baton_distinct_weights",
            "Different weights that workers of one model serve; above 1: answers come from any.",
            {(one.card.name,): len(one.fleet.contents) for one in self._services},
            _MODEL,
        )
        yield gauge(
            "baton_pool_pressure",
            "Load of a pool by its capacity, as `baton role` shows it; above 1: overloaded.",
            {
                (served.name, role): pressure
                for served in self._models
                for role, pressure in served.rebalancer.balance.pressures.items()
            },
            ("model", "role"),
        )
        yield gauge(
            "baton_indexed_hashes",
            "Hashes of cached KV blocks and encoder outputs in this router's locality index, "
            "counted once per worker.",
            {(one.card.name,): _num_indexed(one.fleet) for one in self._services},
            _MODEL,
        )
        yield gauge(
            "baton_index_is_warm",
            "Whether this router's locality index has all KV events that its workers published.",
            {(one.card.name,): one.fleet.is_warm for one in self._services},
            _MODEL,
        )


def _num_indexed(fleet: Fleet) -> int:
    return sum(fleet.index.num_hashes(member.record.id) for member in fleet.members)
