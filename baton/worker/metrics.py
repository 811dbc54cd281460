"""Metrics of a worker, collected when scraped from counters that exist anyway."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from baton.engine.scheduler.scheduler_stats import SchedulerStats
from baton.rpc.worker_role import Role
from baton.serving.telemetry.families import counter, gauge
from baton.serving.telemetry.redis import redis_metrics
from baton.worker.membership import Membership
from baton.worker.model_host import ModelHost

Labels = tuple[str, ...]
Totals = Mapping[str, Mapping[Labels, float]]
"""Counts since the start, by name and by labels without the role."""

_STEPS, _STEP_TOKENS = "baton_steps_total", "baton_step_tokens_total"
_STEPS_AHEAD = "baton_steps_ahead_total"
_STEP_SECONDS = "baton_step_seconds_total"
_HITS, _LOOKUPS = "baton_prefix_hit_tokens_total", "baton_prefix_lookup_tokens_total"
_PREEMPTIONS = "baton_preemptions_total"
_COMPILATIONS = "baton_kernel_compilations_total"
_NON_FINITE = "baton_non_finite_requests_total"
_SWAPPED = "baton_swapped_kv_blocks_total"
_ENCODED = "baton_encoded_tokens_total"
_DRAFTED, _ACCEPTED = "baton_drafted_tokens_total", "baton_accepted_tokens_total"

# Help text by name, and the labels beside the role.
_COUNTED: dict[str, tuple[str, tuple[str, ...]]] = {
    _STEPS: ("Engine steps that computed tokens.", ()),
    _STEPS_AHEAD: (
        "Engine steps launched before the tokens of the step before were known; none on a CPU.",
        (),
    ),
    _STEP_TOKENS: (
        "Tokens computed by engine steps: prompt tokens, draft tokens included, or one token per "
        "decoding sequence.",
        ("kind",),
    ),
    _STEP_SECONDS: (
        "Time of the engine's thread by phase of a step: schedule, forward (computing), sample.",
        ("phase",),
    ),
    _HITS: (
        "Prefix cache hits in prompt tokens: in the worker's own cache (prefill_local, "
        "decode_local) or fetched from another worker's cache (external).",
        ("source",),
    ),
    _LOOKUPS: ("Prefix cache lookups in prompt tokens: those of all started sequences.", ()),
    _PREEMPTIONS: (
        "Preempted sequences: recomputed, swapped to host memory, or returned to the router.",
        ("mode",),
    ),
    _COMPILATIONS: (
        "Kernels compiled after the warm-up, each of which stalled a step for seconds: expected 0.",
        (),
    ),
    _NON_FINITE: (
        "Requests that failed because their logits were NaN or infinite: expected 0.",
        (),
    ),
    _SWAPPED: (
        "KV blocks of preempted sequences copied to host memory (out) and back (in).",
        ("direction",),
    ),
    _ENCODED: ("Tokens of encoder inputs that were encoded.", ()),
    _DRAFTED: ("Draft tokens of speculative decoding.", ()),
    _ACCEPTED: ("Accepted draft tokens of speculative decoding.", ()),
}


class WorkerMetrics:
    """Metrics collector of a worker (`baton.serving.telemetry.exposition`). Those of the engine are
    missing until the model is loaded."""

    def __init__(self, model: ModelHost, membership: Membership) -> None:
        self._model = model
        self._membership = membership
        self._totals = RoleTotals()
        membership.on_new_epoch.append(self._count_roles)

    def collect(self) -> Iterable[Metric]:
        member = self._membership
        yield self._gauge(
            "baton_worker_ready",
            "Whether the worker is ready and not draining.",
            member.is_ready and not member.is_draining,
        )
        yield from redis_metrics(member.round_trips, member.staleness)
        yield gauge(
            "baton_unpublished_kv_events",
            "KV events of this worker that are not in Redis yet.",
            member.num_unpublished_events,
        )
        if member.is_ready:
            stats = self._model.engine.reading.stats
            yield from self._information()
            yield self._gauge(
                "baton_worker_paused",
                "Whether this worker starts no new request (baton pause --admin).",
                self._model.engine.is_paused,
            )
            yield from self._sequences(stats)
            yield from self._blocks(stats)
            yield from self._encoder(stats)
            yield from self._counted()

    def _count_roles(self) -> None:
        """Adds what was counted since the last call to the totals of the worker's present role."""
        if not self._membership.is_ready:
            return
        engine = self._model.engine
        stats, done, spent = (
            engine.reading.stats,
            engine.reading.work_done,
            engine.reading.time_spent,
        )
        totals: Totals = {
            _STEPS: {(): done.num_steps},
            _STEPS_AHEAD: {(): stats.num_steps_ahead},
            _STEP_TOKENS: {
                ("prompt",): done.num_prompt_tokens,
                ("decode",): done.num_decode_tokens,
            },
            _STEP_SECONDS: {
                ("schedule",): spent.schedule,
                ("forward",): spent.forward,
                ("sample",): spent.sample,
            },
            _HITS: {("local",): stats.num_hit_tokens, ("external",): stats.num_pulled_tokens},
            _LOOKUPS: {(): stats.num_prompt_tokens},
            _PREEMPTIONS: {
                ("recompute",): stats.num_recomputes,
                ("swap",): stats.num_swaps,
                ("return",): stats.num_returns,
            },
            _NON_FINITE: {(): stats.num_non_finite_requests},
            _COMPILATIONS: {(): engine.reading.num_late_compilations},
            _SWAPPED: {
                ("out",): stats.num_swapped_out_blocks,
                ("in",): stats.num_swapped_in_blocks,
            },
            _ENCODED: {(): done.num_encoder_tokens},
            _DRAFTED: {(): stats.num_drafted_tokens},
            _ACCEPTED: {(): stats.num_accepted_tokens},
        }
        self._totals.add(self._membership.role, totals)

    def _counted(self) -> Iterable[Metric]:
        self._count_roles()
        for name, (text, labels) in _COUNTED.items():
            values = self._totals.of(name)
            if name == _HITS:
                values = {
                    (r, f"{r}_local" if k == "local" else k): n for (r, k), n in values.items()
                }
            yield counter(name, text, values, ("role", *labels))

    def _information(self) -> Iterable[Metric]:
        member, engine = self._membership, self._model.engine
        yield gauge(
            "baton_worker_info",
            "Identity of the worker, in the labels; always 1.",
            {(member.id, member.role, self._model.name): 1},
            ("worker", "role", "model"),
        )
        yield self._gauge(
            "baton_step_token_budget",
            "Maximum tokens of one engine step.",
            engine.facts.max_num_batched_tokens,
        )
        yield self._gauge(
            "baton_sequence_budget",
            "Batch slots: the maximum of concurrently running sequences.",
            engine.facts.max_num_seqs,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        """Returns a gauge of the present role."""
        return gauge(name, text, {(self._membership.role,): value}, ("role",))

    def _gauges(self, name: str, text: str, by_state: Mapping[str, float]) -> Metric:
        """Returns a gauge of the present role by state."""
        role = self._membership.role
        return gauge(name, text, {(role, s): n for s, n in by_state.items()}, ("role", "state"))

    def _sequences(self, stats: SchedulerStats) -> Iterable[Metric]:
        yield self._gauges(
            "baton_sequences",
            "Sequences in the engine: waiting for admission, running, awaiting their KV, swapped "
            "to host memory, or computed and kept for another worker.",
            {
                "waiting": stats.num_waiting,
                "running": stats.num_running,
                "awaiting_kv": stats.num_awaiting_kv,
                "swapped": stats.num_swapped,
                "kept": stats.num_kept,
            },
        )

    def _encoder(self, stats: SchedulerStats) -> Iterable[Metric]:
        """Yields the encoder's metrics; all zero for a model without one."""
        num_held, num_cached = stats.num_held_encoder_blocks, stats.num_cached_encoder_blocks
        yield self._gauges(
            "baton_encoder_blocks",
            "Blocks of encoder outputs: held by sequences, leases or arriving outputs, cached and "
            "not held, or free.",
            {
                "held": num_held,
                "cached": num_cached,
                "free": stats.num_encoder_blocks - num_held - num_cached,
            },
        )
        yield self._gauge(
            "baton_waiting_encoder_tokens",
            "Tokens of encoder inputs that wait to be encoded for other workers.",
            stats.num_waiting_encoder_tokens,
        )

    def _blocks(self, stats: SchedulerStats) -> Iterable[Metric]:
        yield self._gauges(
            "baton_kv_blocks",
            "KV blocks: held by sequences or leases, cached and not held, or free.",
            {
                "held": stats.num_held_blocks,
                "cached": stats.num_cached_blocks,
                "free": stats.num_free_blocks,
            },
        )
        yield self._gauge(
            "baton_reserved_kv_blocks",
            "KV blocks, cached or free, that are reserved for prompts that have begun.",
            stats.num_reserved_blocks,
        )
        yield self._gauges(
            "baton_host_kv_blocks",
            "KV blocks in host memory: held by swapped sequences, or free.",
            {
                "held": stats.num_held_host_blocks,
                "free": stats.num_host_blocks - stats.num_held_host_blocks,
            },
        )


class RoleTotals:
    """Counter totals since the start of the process, divided by the role in which they grew. Call
    `add` before a role ends, and before they are read."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, Labels], float] = {}
        self._by_role: dict[str, dict[Labels, float]] = {}

    def add(self, role: Role, totals: Totals) -> None:
        """Adds the growth of `totals` since the last call to the counters of `role`."""
        for name, values in totals.items():
            in_roles = self._by_role.setdefault(name, {})
            for labels, total in values.items():
                grown = total - self._counted.get((name, labels), 0)
                self._counted[name, labels] = total
                in_roles[role, *labels] = in_roles.get((role, *labels), 0) + grown

    def of(self, name: str) -> dict[Labels, float]:
        """Returns the values of a counter by role and labels."""
        return self._by_role.get(name, {})
