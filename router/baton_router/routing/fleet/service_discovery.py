"""HTTP service discovery for Prometheus: the metrics endpoints of this cluster.

Format: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

import json

from baton_router.routing.fleet.fleets import Fleets

PATH = "/targets"


class ServiceDiscovery:
    """Service discovery of this router and the workers that it knows.

    Args:
        own_endpoint: "host:port" of this router's metrics.
    """

    def __init__(self, fleets: Fleets, own_endpoint: str) -> None:
        self._fleets = fleets
        self._own_endpoint = own_endpoint

    def render(self, _accept: str = "") -> tuple[bytes, str]:
        """Returns the response body and its content type. Role, worker id and model are meta
        labels, `__meta_baton_...`, which relabeling may keep."""
        groups = [_group(self._own_endpoint, "router", "", "")]
        for model, member in self._fleets.members:
            record = member.record
            if record.metrics_endpoint:
                groups.append(_group(record.metrics_endpoint, record.role, record.id, model))
        return json.dumps(groups).encode(), "application/json"


def _group(endpoint: str, role: str, worker: str, model: str) -> dict[str, object]:
    labels = {
        "__meta_baton_role": role,
        "__meta_baton_worker": worker,
        "__meta_baton_model": model,
    }
    return {"targets": [endpoint], "labels": labels}
