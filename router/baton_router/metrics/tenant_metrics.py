"""Metrics of the usage and the refusals of tenants."""

from collections.abc import Iterable, Mapping
from itertools import product

from prometheus_client.core import Metric

from baton.serving.telemetry.families import Labels, counter
from baton_router.routing.admission.rate_limit import KINDS
from baton_router.telemetry.tenant_meter import TenantMeter

_TENANT = ("tenant",)


class TenantMetrics:
    """Prometheus collector of the usage and the refusals of tenants."""

    def __init__(self, meter: TenantMeter) -> None:
        self._meter = meter

    def collect(self) -> Iterable[Metric]:
        meter = self._meter
        yield counter(
            "baton_tenant_requests_total",
            "Admitted requests that have ended, by tenant.",
            self._of_all(meter.num_requests),
            _TENANT,
        )
        yield counter(
            "baton_tenant_prompt_tokens_total",
            "Prompt tokens of admitted requests that have ended, by tenant.",
            self._of_all(meter.num_prompt_tokens),
            _TENANT,
        )
        yield counter(
            "baton_tenant_output_tokens_total",
            "Output tokens of admitted requests that have ended, by tenant.",
            self._of_all(meter.num_output_tokens),
            _TENANT,
        )
        limits = (f"{kind}_per_minute" for kind in KINDS)
        refused: dict[Labels, float] = dict.fromkeys(product(meter.labels, limits), 0)
        refused |= meter.num_refused
        yield counter(
            "baton_requests_refused_total",
            "Calls refused before they were computed, over any API: a rate limit of the tenant "
            "(requests_per_minute, tokens_per_minute, bytes_per_minute, tokens_per_second), a full "
            "queue, a deadline before the forecast first token, bounds of large requests and "
            "images, missing credentials.",
            refused,
            ("tenant", "reason"),
        )

    def _of_all(self, counted: Mapping[str, int]) -> dict[Labels, float]:
        """Returns a number for each tenant with a label, also of those that have sent nothing."""
        return {(label,): counted.get(label, 0) for label in {*self._meter.labels, *counted}}
