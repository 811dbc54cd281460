"""Network policies of the chart allow the connections of `baton.serving.network_topology` alone."""

from collections.abc import Iterator

import pytest

from baton.serving.network_topology import CONNECTIONS, PORTS, WORKERS, Connection
from tests.support.rendered_chart import (
    PRESETS,
    component,
    container_of,
    labels_of_pods,
    merged,
    of_kind,
    preset,
    processes,
    render,
    selects,
    values_of,
    workloads,
)

ANY = "any port"
REDIS_PORT = 6379


class Policies:
    """Connections that the network policies of some objects allow."""

    def __init__(self, objects, values, *jobs):
        self.values = values
        self.pods = {c: labels_of_pods(w) for c, w in workloads(objects).items()}
        self.pods |= {component(job): labels_of_pods(job) for job in jobs}
        self._by_component = {component(p): p["spec"] for p in of_kind(objects, "NetworkPolicy")}
        assert self._by_component.keys() == self.pods.keys()
        # Without both, what is not allowed in one direction would be open.
        for spec in self._by_component.values():
            assert spec["policyTypes"] == ["Ingress", "Egress"]

    def edges(self) -> set[tuple[str, str, object]]:
        """Returns (source, target, port) of what is let through at both ends."""
        out, into = set(self._egress()), set(self._ingress())
        ours = {edge for edge in out | into if {edge[0], edge[1]} <= self.pods.keys()}
        assert ours <= out, f"may not leave: {ours - out}"
        assert ours <= into, f"may not come in: {ours - into}"
        return out | into

    def _ingress(self) -> Iterator[tuple[str, str, object]]:
        for target, spec in self._by_component.items():
            for rule in spec["ingress"]:
                for peer in rule["from"]:
                    for source in self._peers(peer):
                        yield from ((source, target, port) for port in _ports(rule))

    def _egress(self) -> Iterator[tuple[str, str, object]]:
        for source, spec in self._by_component.items():
            for rule in spec["egress"]:
                targets = [t for peer in rule.get("to", ()) for t in self._peers(peer)]
                if "to" not in rule:
                    targets = ["anywhere"]
                yield from ((source, t, port) for t in targets for port in _ports(rule))

    def _peers(self, peer) -> list[str]:
        policy = self.values["networkPolicy"]
        for who in ("clients", "scrapers", "dns"):
            if peer in policy[who]:
                return [who]
        assert peer.keys() == {"podSelector"}, peer
        found = [c for c, labels in self.pods.items() if selects(peer["podSelector"], labels)]
        assert found, f"finds no pod: {peer}"
        return found


def _ports(rule) -> list[object]:
    return [port["port"] for port in rule["ports"]] if rule.get("ports") else [ANY]


def may_be_nixl(values) -> bool:
    """Returns whether NIXL may be used; where TLS is on, values have to ask for it."""
    connector = values["kv"]["connector"]
    return connector == "nixl" or (connector == "auto" and not values["tls"]["enabled"])


def absent_from(values) -> set[str]:
    """The processes that a release with these values does not deploy."""
    picker, encode = values["endpointPicker"], values["encode"]
    has_encode = encode["replicas"] or encode["autoscaling"]["enabled"]
    return {
        *(() if picker["enabled"] else ("endpoint-picker",)),
        *(() if has_encode else ("encode",)),
    }


def wanted(edge: Connection, values) -> set[tuple[str, str, object]]:
    """The same edge as policies are to allow it, under these values."""
    source = {"client": "clients", "scraper": "scrapers"}.get(edge.source, edge.source)
    redis = values["redis"]
    if not {edge.source, edge.target}.isdisjoint(absent_from(values)):
        return set()
    match edge.target, edge.port:
        case "router", "admin":
            return set()  # it listens on loopback, where a port-forward comes from
        case _, "http" if not values["router"]["http"]:
            return set()
        case _, "kv" if may_be_nixl(values):
            return {(source, edge.target, ANY)}
        case _, port if port is not None:
            return {(source, edge.target, values["ports"][port])}
        case "redis", _ if redis["url"]:
            return {(source, "anywhere", port) for port in redis["ports"]}
        case "redis", _:
            return {(source, "redis", REDIS_PORT)}
        case "dns", _:
            return {(source, "dns", port) for port in values["networkPolicy"]["dnsPorts"]}
        case "hub", _:
            return {(source, "anywhere", 443)} if values["model"]["source"] == "hub" else set()
        case "images", _:
            hosts = values["router"]["settings"].get("images_url_hosts")
            return {(source, "anywhere", port) for port in (80, 443)} if hosts else set()
        case "endpoint", _:
            ports = values["endpointPicker"]["endpointPorts"]
            return {(source, "anywhere", port) for port in ports}
        case "collector", _:
            return {(source, "anywhere", 4317)} if values["tracing"]["endpoint"] else set()
    raise AssertionError(edge)


def needed(values) -> set[tuple[str, str, object]]:
    return {found for edge in CONNECTIONS for found in wanted(edge, values)}


@pytest.mark.parametrize("name", PRESETS)
def test_network_policies_allow_only_edges_of_topology(name):
    values = merged(values_of(name))
    assert Policies(preset(name), values).edges() == needed(values)


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("connector", ["grpc", "nixl", "auto"])
def test_network_policies_open_any_worker_port_only_for_nixl(connector, is_encrypted):
    tls = {"enabled": True, "certManager": {"issuer": "baton"}} if is_encrypted else {}
    given = {"kv": {"connector": connector}, "tls": tls}
    edges = Policies(render(given), merged(given)).edges()
    assert edges == needed(merged(given))
    is_any = ("decode", "prefill", ANY) in edges
    assert is_any == (connector == "nixl" or (connector == "auto" and not is_encrypted))


def test_network_policies_let_out_what_settings_name():
    given = {
        "router": {"settings": {"images_url_hosts": "images.example"}},
        "model": {"source": "hub", "name": "org/model"},
        "networkPolicy": {"dnsPorts": [53, 5353]},
    }
    edges = Policies(render(given), merged(given)).edges()
    assert edges == needed(merged(given))
    assert {port for _, target, port in edges if target == "dns"} == {53, 5353}
    out = {(source, port) for source, target, port in edges if target == "anywhere"}
    assert out == {("router", 80), *((process, 443) for process in ("router", "prefill", "decode"))}


def test_network_policies_let_all_processes_out_by_egress():
    store = {
        "to": [{"ipBlock": {"cidr": "10.2.0.0/16", "except": ["10.2.1.0/24"]}}],
        "ports": [{"protocol": "TCP", "port": 9000}],
    }
    given = {"networkPolicy": {"egress": [store]}, "endpointPicker": {"enabled": True}}
    rules = {component(p): p["spec"]["egress"] for p in of_kind(render(given), "NetworkPolicy")}
    assert {process for process, egress in rules.items() if store in egress} == {
        *("router", "prefill", "decode", "endpoint-picker")
    }
    assert rules["redis"] == []


@pytest.mark.parametrize("name", PRESETS)
def test_containers_have_the_ports_of_their_processes(name):
    values = merged(values_of(name))
    for process, workload in processes(preset(name)).items():
        expected = {port for port, (_, of) in PORTS.items() if process in of}
        if not values["router"]["http"]:
            expected -= {"http"}
        container = container_of(workload)
        assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
            port: values["ports"][port] for port in expected
        }
        variables = {v["name"]: v.get("value") for v in container["env"]}
        for port in expected:
            assert variables[f"BATON_{PORTS[port][0].upper()}"] == str(values["ports"][port])


def test_network_topology_has_kv_edges_to_all_worker_roles():
    assert {edge.target for edge in CONNECTIONS if edge.port == "kv"} == set(WORKERS)
