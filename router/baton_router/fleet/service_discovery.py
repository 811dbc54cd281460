"""HTTP service discovery for Prometheus: the metrics endpoints of this cluster.

Format: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

import json

from baton_router.fleet.fleet import Fleet

PATH = "/targets"


class ServiceDiscovery:
    """Service discovery of this router and the workers that it knows.

    Args:
        own_endpoint: "host:port" of this router's metrics.
    """

    def __init__(self, fleet: Fleet, own_endpoint: str) -> None:
        self._fleet = fleet
        self._own_endpoint = own_endpoint

    def render(self, _accept: str = "") -> tuple[bytes, str]:
        """Returns the response body and its content type. Role and worker id are meta labels,
        `__meta_baton_...`, which relabeling may keep."""
        groups = [_group(self._own_endpoint, "router", "")]
        for member in self._fleet.members:
            record = member.record
            if record.metrics_endpoint:
                groups.append(_group(record.metrics_endpoint, record.role, record.id))
        return json.dumps(groups).encode(), "application/json"


def _group(endpoint: str, role: str, worker: str) -> dict[str, object]:
    labels = {"__meta_baton_role": role, "__meta_baton_worker": worker}
    return {"targets": [endpoint], "labels": labels}
